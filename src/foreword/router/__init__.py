"""Router: know what each worker has cached, to send requests where their prefix is."""
