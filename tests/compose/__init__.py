"""`make compose-test`: the images and docker-compose.yml on a real Docker engine, from build to nothing left.

Everything runs in namespaces of its own - processes, mounts, network - so that the kernel clears up whatever
happens, and no port, bridge or firewall rule of this machine is touched. No image registry is needed: the
base image is a Debian made here, and pip finds in it the wheels that were fetched before.
"""
