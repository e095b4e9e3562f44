"""The dashboard: pages below ``/ui``."""
