"""Backends: what runs a model in a worker. ``protocol`` says what each must do, ``registry`` finds them by name."""
