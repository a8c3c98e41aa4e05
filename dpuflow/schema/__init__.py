"""Every record that passes from one stage to the next, the bundles they travel in, and the C header."""
