"""Settings and logging of a service.

`settings.Settings` has every key with its default; `sources.read_settings` reads them from a file,
the environment and flags. May import `control` and the packages below it.
"""
