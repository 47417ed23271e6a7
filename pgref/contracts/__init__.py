"""What the stores promise: protocols and frozen values. The guarantees (G1, G2, …) are listed in docs/reference."""
