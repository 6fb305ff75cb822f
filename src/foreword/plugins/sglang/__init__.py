"""What SGLang finds by name in `foreword.plugins.sglang`."""

from foreword.plugins.sglang.storage import ForewordStorage as ForewordStorage
