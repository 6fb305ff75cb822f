"""Import traces, replay them through the real core in virtual time, plan capacity."""
