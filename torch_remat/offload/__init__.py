"""Where offloaded tensors go: the protocol of an offloader, and the two that come with the library.

Nothing here knows of regions. The runtime decides what travels and when; an offloader takes one-dimensional tensors
away and brings them back.
"""
