"""The log: what forward notes of all that replay may skip, and how replay answers it."""
