"""How a run is spread over devices."""
