"""``mxpool verify``: whether a served model's answers can be trusted, check by check."""
