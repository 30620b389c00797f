"""``argus serve``: the page of any run of a store, in a browser, while the run goes on."""
