"""Whether replay does what forward did: what is compared, and the errors where the two differ."""
