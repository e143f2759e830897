"""The running process of a service: commit loop, replica, follower, leader election.

`runtime.Runtime` is the entry point. The only package with threads and clocks. May import `config`,
`control` and the packages below them.
"""
