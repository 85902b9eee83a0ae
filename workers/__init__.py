"""The worker process: one session or engine, fed with slots by the broker."""
