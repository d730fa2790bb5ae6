"""Parts of the scripts that measure."""
