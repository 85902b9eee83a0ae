"""The programs: ``mx-broker``, ``mx-worker`` and ``mxpool``. Only here are flags and the environment read."""
