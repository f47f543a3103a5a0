"""Every region: its forward, its replay, and what is kept between them."""
