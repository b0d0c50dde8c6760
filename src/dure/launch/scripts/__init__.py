"""Scripts under `dure run`, as a rank runs them."""
