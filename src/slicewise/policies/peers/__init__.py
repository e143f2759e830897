"""The placement rules of other systems, to be compared with ours on the same arrivals.

Each follows a source that its module names, and says where it departs from it. Common to all: a
tenant names a profile and gets that profile, one instance at a time, and ties go to the first
node and the lowest GPU id.
"""
