"""Page of a comparison of short runs: `dure compare` and `dure scale` with `--html`."""
