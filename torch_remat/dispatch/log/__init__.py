"""The log: what forward notes of all that replay may leave out, and how replay answers it."""
