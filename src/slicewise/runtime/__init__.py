"""The running process of a service: commit loop, replica, follower, leader election.

`runtime.Runtime` is the entry point. The service's clocks are here, and the threads of its commits,
follower and leader election. May import `config`, `control` and the packages below them.
"""
