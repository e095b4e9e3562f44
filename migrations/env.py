"""Alembic's entry: runs the migrations on the connection that ``pilotlight.common.db.migrate``
opened, in its transaction.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table_schema="public")
context.run_migrations()
