-- The scripts of the Redis store. Redis runs each function below the line as one atomic step.
--
-- Keys, after the prefix:
--   binding:<key>          hash {epoch, binding, index, session}; index is empty for an affinity key
--   owner:<owner>:ends     sorted set: an owner's sessions by their end in milliseconds
--   owner:<owner>:names    sorted set: the same sessions by name
--   workers, workers:ends  hash from name to address; sorted set of names by the end of their registration
--   epoch                  the last epoch that was given out
-- Every key has a time to live. Scripts derive keys from other keys, so this needs one Redis, not Redis Cluster.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- A collection lives as long as its last member.
local function keep(key, milliseconds)
  if redis.call('PTTL', key) < tonumber(milliseconds) then redis.call('PEXPIRE', key, milliseconds) end
end

local function remember(index, session, milliseconds)
  if index == '' then return end
  redis.call('ZADD', index .. ':ends', now + milliseconds, session)
  redis.call('ZADD', index .. ':names', 0, session)
  keep(index .. ':ends', milliseconds)
  keep(index .. ':names', milliseconds)
end

local function forget(index, session)
  if index == '' then return end
  redis.call('ZREM', index .. ':ends', session)
  redis.call('ZREM', index .. ':names', session)
end

local function sweep(index, most)
  local ended = redis.call('ZRANGEBYSCORE', index .. ':ends', '-inf', now, 'LIMIT', 0, most)
  for _, session in ipairs(ended) do forget(index, session) end
  return #ended
end

local function bind(key, epoch, binding, milliseconds, index, session)
  redis.call('HSET', key, 'epoch', epoch, 'binding', binding, 'index', index, 'session', session)
  redis.call('PEXPIRE', key, milliseconds)
  remember(index, session, milliseconds)
end

-- ----------------------------------------------------------------------------------------------------------------

local function claim()
  local epoch, binding, milliseconds, index, session, quota = unpack(ARGV)
  local held = redis.call('HGET', KEYS[1], 'binding')
  if held then return {0, held} end
  if index ~= '' then
    sweep(index, 100)
    local live = redis.call('ZCOUNT', index .. ':ends', string.format('(%.0f', now), '+inf')
    if quota ~= '' and live >= tonumber(quota) then return {0, false} end
  end
  bind(KEYS[1], epoch, binding, milliseconds, index, session)
  return {1, binding}
end

local function rebind()
  local epoch, binding, milliseconds, index, session, old_epoch = unpack(ARGV)
  local held = redis.call('HMGET', KEYS[1], 'epoch', 'binding', 'index')
  if held[1] and held[1] ~= old_epoch then return held[2] end
  bind(KEYS[1], epoch, binding, milliseconds, held[3] or index, session)
  return binding
end

local function renew()
  local epoch, milliseconds = unpack(ARGV)
  local held = redis.call('HMGET', KEYS[1], 'epoch', 'index', 'session')
  if held[1] ~= epoch then return 0 end
  redis.call('PEXPIRE', KEYS[1], milliseconds)
  remember(held[2], held[3], milliseconds)
  return 1
end

local function release()
  local held = redis.call('HMGET', KEYS[1], 'epoch', 'index', 'session')
  if held[1] ~= ARGV[1] then return 0 end
  redis.call('DEL', KEYS[1])
  forget(held[2], held[3])
  return 1
end

local function sweep_owner()
  return sweep(KEYS[1], ARGV[1])
end

-- From the clock, so that a Redis that lost its data continues above the old epochs. Lua's numbers hold microseconds exactly until 2255.
local function next_epoch()
  local last = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), tonumber(ARGV[1]))
  local epoch = string.format('%.0f', math.max(last + 1, clock[1] * 1000000 + clock[2]))
  redis.call('SET', KEYS[1], epoch, 'EX', 86400)
  return epoch
end

local function register()
  local name, address, milliseconds = unpack(ARGV)
  redis.call('HSET', KEYS[1], name, address)
  redis.call('ZADD', KEYS[2], now + milliseconds, name)
  keep(KEYS[1], milliseconds)
  keep(KEYS[2], milliseconds)
end

local function deregister()
  if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return end
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end

local function members()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
  end
  return redis.call('HGETALL', KEYS[1])
end
