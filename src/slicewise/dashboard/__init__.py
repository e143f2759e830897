"""The dashboard: a page that shows the slices, and what it asks of the service beyond the API."""
