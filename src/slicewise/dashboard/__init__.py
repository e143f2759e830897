"""The dashboard: static pages on top of the API, and the policy comparison.

Entry points: `pages.Pages` (an ASGI app of static files) and `comparison_routes.routes`.
May import the engine, the lab's workloads and the server's routing.
"""
