"""``mxpool bench --sweep``: the same model with other numbers of workers, with and without a device graph."""
