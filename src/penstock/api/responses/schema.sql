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
CREATE INDEX IF NOT EXISTS responses_of_owner ON responses (owner, created);
CREATE INDEX IF NOT EXISTS responses_running ON responses (runner) WHERE runner IS NOT NULL;

CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used);
CREATE INDEX IF NOT EXISTS conversations_of_owner ON conversations (owner, used);

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

-- How much each owner has: the content of its rows, and 256 bytes for each row and its indexes. Kept by the triggers below. Their statements
-- say OR IGNORE, not ON CONFLICT: in a trigger, the conflict rule of the statement that fired it counts.
CREATE TABLE IF NOT EXISTS owners (
    owner TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owners_by_size ON owners (bytes);

CREATE VIEW IF NOT EXISTS sizes AS
    SELECT owner, 256 + LENGTH(body) + IFNULL(LENGTH(events), 0) AS bytes FROM responses
    UNION ALL SELECT owner, 256 + LENGTH(metadata) FROM conversations
    UNION ALL SELECT owner, 256 + LENGTH(content) FROM items;
-- For a file from before there was this table.
INSERT INTO owners SELECT owner, SUM(bytes) FROM sizes WHERE NOT EXISTS (SELECT 1 FROM owners) GROUP BY owner;

CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
    INSERT OR IGNORE INTO owners VALUES (NEW.owner, 0);
    UPDATE owners SET bytes = bytes + 256 + LENGTH(NEW.body) + IFNULL(LENGTH(NEW.events), 0) WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS response_changed AFTER UPDATE OF body, events ON responses BEGIN
    UPDATE owners SET bytes = bytes + LENGTH(NEW.body) + IFNULL(LENGTH(NEW.events), 0) - LENGTH(OLD.body) - IFNULL(LENGTH(OLD.events), 0)
    WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS response_deleted AFTER DELETE ON responses BEGIN
    UPDATE owners SET bytes = bytes - 256 - LENGTH(OLD.body) - IFNULL(LENGTH(OLD.events), 0) WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND bytes <= 0;
END;
CREATE TRIGGER IF NOT EXISTS conversation_added AFTER INSERT ON conversations BEGIN
    INSERT OR IGNORE INTO owners VALUES (NEW.owner, 0);
    UPDATE owners SET bytes = bytes + 256 + LENGTH(NEW.metadata) WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS conversation_changed AFTER UPDATE OF metadata ON conversations BEGIN
    UPDATE owners SET bytes = bytes + LENGTH(NEW.metadata) - LENGTH(OLD.metadata) WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS conversation_deleted AFTER DELETE ON conversations BEGIN
    UPDATE owners SET bytes = bytes - 256 - LENGTH(OLD.metadata) WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND bytes <= 0;
END;
CREATE TRIGGER IF NOT EXISTS item_added AFTER INSERT ON items BEGIN
    INSERT OR IGNORE INTO owners VALUES (NEW.owner, 0);
    UPDATE owners SET bytes = bytes + 256 + LENGTH(NEW.content) WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS item_deleted AFTER DELETE ON items BEGIN
    UPDATE owners SET bytes = bytes - 256 - LENGTH(OLD.content) WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND bytes <= 0;
END;
