"""The texts that the laboratory trains on."""
