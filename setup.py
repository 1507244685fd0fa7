"""Which packages a wheel holds; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

#: Folders that are installed under another name than they have in the tree.
RENAMED = {"hf_paged_eviction_eval": "eval"}

packages = find_packages(include=["hf_paged_eviction", "hf_paged_eviction.*"])
for name, folder in RENAMED.items():
    packages += [name, *(f"{name}.{below}" for below in find_packages(folder))]

setup(packages=packages, package_dir=RENAMED)
