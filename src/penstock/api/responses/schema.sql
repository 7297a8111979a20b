-- The tables of the response store.

CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    root TEXT NOT NULL, -- the first response of its chain
    previous TEXT,
    conversation TEXT,
    is_background INTEGER NOT NULL,
    status TEXT NOT NULL,
    runner TEXT, -- the process that makes it; NULL when it is finished
    body BLOB NOT NULL, -- without its output, which is in its items
    events BLOB
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created);
CREATE INDEX IF NOT EXISTS responses_running ON responses (runner) WHERE runner IS NOT NULL;

CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used);

CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    holder TEXT NOT NULL, -- a response or a conversation
    kind TEXT NOT NULL, -- of a response: input or output; of a conversation: member
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    content BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS items_of_holder ON items (holder, kind, id);
CREATE INDEX IF NOT EXISTS items_of_owner ON items (owner, id);
