"""How a model that is not there comes to serve: what a start takes, on which workers, in time."""
