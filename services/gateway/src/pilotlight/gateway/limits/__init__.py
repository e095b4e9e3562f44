"""How much keys and projects may use: rates, places, budgets, shared by all gateways."""
