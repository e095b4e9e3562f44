"""The admin REST API under ``/admin/v1``."""
