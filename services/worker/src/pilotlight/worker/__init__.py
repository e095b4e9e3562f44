"""Speaks for one device: lifecycle, admission, token batches; supervises its engine."""
