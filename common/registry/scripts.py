"""Lua scripts of the run ledger; each runs as one move.

All but `NEXT_EPOCH` answer with a pair: an outcome (`done`, `missing`, `stale`, `state`, `taken`)
and what was found. A token, kept in the record, makes the repetition of a write have no effect.
"""

from __future__ import annotations

# KEYS: record, runs, request (or empty). ARGV: run id, creation, state, token, request TTL,
# then field, value pairs.
CREATE = """
if KEYS[3] ~= '' then
  local earlier = redis.call('GET', KEYS[3])
  if earlier then return {'done', earlier} end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  if redis.call('HGET', KEYS[1], 'created_by') == ARGV[4] then return {'done', ARGV[1]} end
  return {'taken', ARGV[1]}
end
redis.call('HSET', KEYS[1], 'epoch', 0, 'state', ARGV[3], 'created_unix_ms', ARGV[2],
           'created_by', ARGV[4])
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
if KEYS[3] ~= '' then redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[5]) end
return {'done', ARGV[1]}
"""

# KEYS: record. Answers the epoch; 0: no such run. Repeated, it skips one, which does no harm.
NEXT_EPOCH = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""

_FENCE = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then return {'missing', ''} end
if tonumber(epoch) ~= tonumber(ARGV[1]) then return {'stale', epoch} end
"""

# KEYS: record. ARGV: epoch, token, expected states (JSON list, or empty), state (or empty),
# then field, value pairs.
UPDATE = f"""
{_FENCE}
if redis.call('HGET', KEYS[1], 'updated_by') == ARGV[2] then return {{'done', ''}} end
if ARGV[3] ~= '' then
  local state, legal = redis.call('HGET', KEYS[1], 'state'), false
  for _, name in ipairs(cjson.decode(ARGV[3])) do legal = legal or name == state end
  if not legal then return {{'state', state}} end
end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'state', ARGV[4]) end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], 'updated_by', ARGV[2])
return {{'done', ''}}
"""

# KEYS: record, journal. ARGV: epoch, token, limit, kind, body.
APPEND_JOURNAL = f"""
{_FENCE}
if redis.call('HGET', KEYS[1], 'journaled_by') == ARGV[2] then
  return {{'done', redis.call('HGET', KEYS[1], 'journaled_id')}}
end
local id = redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*',
                      'kind', ARGV[4], 'epoch', ARGV[1], 'body', ARGV[5])
redis.call('HSET', KEYS[1], 'journaled_by', ARGV[2], 'journaled_id', id)
return {{'done', id}}
"""

# KEYS: record, durable. ARGV: epoch, kind, record (JSON).
COMMIT_DURABLE = f"""
{_FENCE}
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return {{'done', ''}}
"""
