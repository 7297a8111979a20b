"""Images, from the official clients to every engine that reads them. The tests cannot tell one engine from another."""
