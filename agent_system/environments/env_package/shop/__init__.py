"""Small online shop with the actions of WebShop and a generated catalogue."""
