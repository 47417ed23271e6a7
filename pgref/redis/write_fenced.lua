-- Compare, raise the fence, run the commands: one step that nobody sees half of, and that leaves nothing if it fails.
-- KEYS: the fence. ARGV: the new fence, then each command as its number of words and its words.
-- Answers: written | stale SEEN | alien VALUE | failed POSITION ERROR (undone) | broken POSITION ERROR (not undone).
local fence_key, fence = KEYS[1], ARGV[1]
local saved = {}

local function call(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    error(reply.err, 0)
  end
  return reply
end

-- Decimal digits without leading zeros: as numbers they would be exact up to 2^53 only.
local function lower(one, other)
  if #one ~= #other then
    return #one < #other
  end
  return one < other
end

local function require_right(...)
  if not redis.acl_check_cmd(...) then
    error('NOPERM ' .. (...) .. ' is needed to undo a write that fails', 0)
  end
end

-- Keep what a key holds. Whether it can be put back is asked now, not when it is too late.
local function save(key)
  if saved[key] then
    return
  end
  require_right('RESTORE', key, '0', '')
  require_right('DEL', key)
  saved[key] = {dump = call('DUMP', key), expires = call('PEXPIRETIME', key)}
end

local function undo(seen)
  for key, was in pairs(saved) do
    if was.dump then
      call('RESTORE', key, math.max(was.expires, 0), was.dump, 'REPLACE', 'ABSTTL')
    else
      call('DEL', key)
    end
  end
  if seen == '0' then
    call('DEL', fence_key)
  else
    call('SET', fence_key, seen)
  end
end

local function keys_of(...)
  local keys = redis.pcall('COMMAND', 'GETKEYS', ...)
  if keys.err and not keys.err:find('no key', 1, true) then
    error(keys.err, 0)
  end
  if keys.err or #keys == 0 then
    error('INVALID names no key, so it could not be undone', 0)
  end
  return keys
end

-- A command that fails changes nothing, so what the last one touches need not be kept.
local function run(is_last, ...)
  for _, key in ipairs(keys_of(...)) do
    if key == fence_key then
      error('INVALID names the fence itself', 0)
    end
    if not is_last then
      save(key)
    end
  end
  call(...)
end

local seen = redis.call('GET', fence_key) or '0'
if seen ~= '0' and not (#seen <= 19 and seen:find('^[1-9]%d*$')) then
  return {'alien', seen}
end
if lower(fence, seen) then
  return {'stale', seen}
end

local position = 0
local ok, problem = pcall(function()
  require_right('DEL', fence_key)
  call('SET', fence_key, fence)  -- once a script has written, the server denies it nothing for want of memory or replicas
  local at = 2
  while at <= #ARGV do
    local last = at + tonumber(ARGV[at])
    position = position + 1
    run(last == #ARGV, unpack(ARGV, at + 1, last))
    at = last + 1
  end
end)
if ok then
  return {'written'}
end
if position == 0 or pcall(undo, seen) then
  return {'failed', position, problem}
end
return {'broken', position, problem}
