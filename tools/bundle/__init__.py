"""The offline installation archive: ``python tools/bundle/build.py`` makes it, ``install.sh``
installs from it without an index.
"""
