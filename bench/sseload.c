/* sseload: loads an HTTP/1.1 server with streams of server-sent events and checks each of them.
 *
 * One thread, one epoll. All connections are opened first. Then the clock starts, and each connection sends its next request as soon as
 * the reply before is complete, until all requests are sent. Prints one line of JSON with the figures. Exits with 0 when every request was
 * correct, with 3 when one was not, with 2 when the run could not start.
 *
 * A request is correct when its reply has status 200 and a complete body, contains `data: [DONE]` with nothing behind it, has no error
 * event, and has the numbers that the --expect options name.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_MS 1000000ull
#define NS_PER_S 1000000000ull
#define READ_BYTES (256 * 1024)
#define MAX_EVENTS 4096
#define MAX_CONNECTING 128
#define CONNECT_SECONDS 60
#define SAMPLE_MS 250
#define SLOW_RECEIVE_BYTES 4096
#define MAX_PROCESSES 32
#define MAX_STATUS 1000

typedef uint64_t Nanoseconds;

static void fail(const char *what)
{
    fprintf(stderr, "sseload: %s: %s\n", what, strerror(errno));
    exit(2);
}

static Nanoseconds now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (Nanoseconds)t.tv_sec * NS_PER_S + (Nanoseconds)t.tv_nsec;
}

static double seconds(Nanoseconds span) { return (double)span / NS_PER_S; }

/* ---- Growing text ---- */

typedef struct {
    char *text;
    size_t length, capacity;
} Buffer;

static void reserve(Buffer *buffer, size_t more)
{
    size_t needed = buffer->length + more;
    if (needed <= buffer->capacity)
        return;
    buffer->capacity = needed < 1024 ? 2048 : 2 * needed;
    buffer->text = realloc(buffer->text, buffer->capacity);
    if (!buffer->text)
        fail("out of memory");
}

static void append(Buffer *buffer, const char *text, size_t length)
{
    reserve(buffer, length + 1);
    memcpy(buffer->text + buffer->length, text, length);
    buffer->length += length;
    buffer->text[buffer->length] = 0;
}

__attribute__((format(printf, 2, 3))) static void append_format(Buffer *buffer, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    char *text;
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0)
        fail("out of memory");
    append(buffer, text, (size_t)length);
    free(text);
}

/* ---- Durations: each power of two is cut into STEPS buckets, so a percentile is wrong by less than 1.6 % ---- */

#define STEP_BITS 6
#define STEPS (1 << STEP_BITS)

typedef struct {
    uint64_t counts[64 * STEPS], total;
    Nanoseconds max;
} Durations;

static int bucket_of(Nanoseconds value)
{
    if (value < STEPS)
        return (int)value;
    int power = 63 - __builtin_clzll(value);
    return (power - STEP_BITS + 1) * STEPS + (int)((value >> (power - STEP_BITS)) & (STEPS - 1));
}

static Nanoseconds start_of(int bucket)
{
    if (bucket < STEPS)
        return (Nanoseconds)bucket;
    int shift = bucket / STEPS - 1;
    return (Nanoseconds)(STEPS + bucket % STEPS) << shift;
}

static void record(Durations *durations, Nanoseconds value)
{
    durations->counts[bucket_of(value)]++;
    durations->total++;
    if (value > durations->max)
        durations->max = value;
}

static double milliseconds_at(const Durations *durations, double share)
{
    if (!durations->total)
        return 0;
    uint64_t wanted = (uint64_t)(share * (double)(durations->total - 1)) + 1, seen = 0;
    for (int bucket = 0; bucket < 64 * STEPS; bucket++) {
        seen += durations->counts[bucket];
        if (seen >= wanted)
            return (double)start_of(bucket) / NS_PER_MS;
    }
    return (double)durations->max / NS_PER_MS;
}

/* ---- Options ---- */

static struct {
    const char *host, *path, *body_file, *label, *method, *dump_file;
    int port, concurrency, requests, slow, slow_bytes, slow_ms, receive_bytes;
    long expected_tokens, expected_finishes, expected_contents;
    double timeout, ramp;
    bool quiet, plain;
    Buffer headers;
} options = {
    .host = "127.0.0.1", .path = "/v1/chat/completions", .label = "", .method = "POST", .port = 8000, .concurrency = 64, .requests = 64,
    .slow_bytes = 1, .slow_ms = 1000, .expected_tokens = -1, .expected_finishes = -1, .expected_contents = -1, .timeout = 600,
};

static const char HELP[] =
    "usage: sseload [options]\n"
    "  -h HOST               address of the server, or unix:/path (127.0.0.1)\n"
    "  -p PORT               (8000)\n"
    "  -u PATH               (/v1/chat/completions)\n"
    "  -b FILE               the request's body; @@ID@@ in it becomes the six-digit number of the request\n"
    "  -c N                  connections (64)\n"
    "  -n N                  requests over all connections (64)\n"
    "  -H 'Name: value'      one more header (repeatable)\n"
    "  -l LABEL              copied into the result\n"
    "  --method METHOD       (POST)\n"
    "  --expect-tokens N     usage.completion_tokens of every reply\n"
    "  --expect-finishes N   finish reasons in every reply\n"
    "  --expect-content N    events with text in every reply\n"
    "  --cpu NAME=PID        report the CPU time and memory of this process (repeatable)\n"
    "  --slow N              the first N connections read slowly: --slow-bytes B (1) every --slow-ms M (1000)\n"
    "  --rcvbuf BYTES        SO_RCVBUF of every connection (slow ones have 4096)\n"
    "  --ramp SECONDS        spread the first requests over this time (0)\n"
    "  --timeout SECONDS     for the whole run (600)\n"
    "  --non-stream          replies are plain JSON\n"
    "  --dump FILE           write every line of every stream: request, seconds, line\n"
    "  --quiet               no summary on standard error\n";

/* ---- Processes whose CPU time and memory are reported ---- */

typedef struct {
    uint64_t user, system; /* clock ticks */
    long resident_kb;
} Usage;

static struct {
    const char *name;
    int pid;
    Usage begin, end;
    long max_resident_kb;
} processes[MAX_PROCESSES];
static int process_count;

static bool read_usage(int pid, Usage *usage)
{
    char path[64], text[2048];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    /* Fields 14, 15 and 24, counted behind the name, which may contain anything. */
    char *fields = strrchr(text, ')');
    unsigned long user, system;
    long pages;
    if (!fields || sscanf(fields + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %*d %*d %*u %*u %ld", &user,
                          &system, &pages) != 3)
        return false;
    *usage = (Usage){user, system, pages * (sysconf(_SC_PAGESIZE) / 1024)};
    return true;
}

static void begin_processes(void)
{
    for (int i = 0; i < process_count; i++) {
        if (!read_usage(processes[i].pid, &processes[i].begin)) {
            fprintf(stderr, "sseload: no process %d\n", processes[i].pid);
            exit(2);
        }
        processes[i].end = processes[i].begin;
        processes[i].max_resident_kb = processes[i].begin.resident_kb;
    }
}

static void sample_processes(void)
{
    for (int i = 0; i < process_count; i++)
        if (read_usage(processes[i].pid, &processes[i].end) && processes[i].end.resident_kb > processes[i].max_resident_kb)
            processes[i].max_resident_kb = processes[i].end.resident_kb;
}

/* ---- One connection and the request that it carries ---- */

typedef enum { CLOSED, CONNECTING, IDLE, SENDING, READING_HEADERS, READING_BODY } State;
typedef enum { CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, FIXED_LENGTH, UNTIL_CLOSE } Framing;

typedef struct {
    int fd;
    State state;
    bool is_slow, awaits_writable;
    Nanoseconds next_slow_read;

    Buffer request;
    size_t sent;
    int number;
    bool is_active;
    Nanoseconds sent_at, last_event_at;

    Buffer headers, line; /* `line` is the unfinished line of a stream, or a whole plain body */
    int status;
    bool keeps_alive;
    Framing framing;
    uint64_t remaining;
    char size_text[32];
    int size_length;
    bool trailer_has_text;

    bool has_event, has_content, is_done;
    long tokens, finishes, contents, errors, after_done;
} Connection;

static Connection *connections;
static int poller;
static struct sockaddr_storage address;
static socklen_t address_length;
static Buffer body, id_places; /* id_places: offsets (size_t) of @@ID@@ in the body */
static FILE *dump;
static char *read_buffer;

static struct {
    long issued, finished, active, max_active;
    long ok, http_errors, not_done, truncated, error_events, after_done, no_usage, token_mismatches, finish_mismatches, content_mismatches;
    long timed_out, connect_errors, reconnects, protocol_errors, finish_length, finish_stop, finish_other, statuses[MAX_STATUS];
    uint64_t tokens, events, contents, bytes, body_bytes, reads;
    Nanoseconds begin, end;
    Durations first_event, first_content, gap, total;
    char error_sample[400];
} totals;

static void watch(Connection *connection, uint32_t events, int operation)
{
    struct epoll_event event = {.events = events, .data.ptr = connection};
    if (epoll_ctl(poller, operation, connection->fd, &event))
        fail("epoll_ctl");
}

/* A slow connection is read by the clock, not when something has come. */
static uint32_t read_events(const Connection *connection) { return connection->is_slow ? 0 : EPOLLIN; }

static void begin_connecting(Connection *connection)
{
    connection->fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection->fd < 0)
        fail("socket");
    int on = 1, receive_bytes = options.receive_bytes ? options.receive_bytes : connection->is_slow ? SLOW_RECEIVE_BYTES : 0;
    if (address.ss_family != AF_UNIX)
        setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (receive_bytes)
        setsockopt(connection->fd, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
    connection->state = CONNECTING;
    if (connect(connection->fd, (struct sockaddr *)&address, address_length) && errno != EINPROGRESS && errno != EAGAIN)
        fail("connect");
    watch(connection, EPOLLOUT, EPOLL_CTL_ADD);
}

static int connect_error(const Connection *connection)
{
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &length);
    return error;
}

static void close_connection(Connection *connection)
{
    if (connection->fd >= 0)
        close(connection->fd);
    connection->fd = -1;
    connection->state = CLOSED;
}

/* ---- Sending ---- */

static void write_request(Connection *connection)
{
    Buffer *request = &connection->request;
    request->length = 0;
    append_format(request, "%s %s HTTP/1.1\r\nHost: %s:%d\r\n", options.method, options.path, options.host, options.port);
    if (body.length || !strcmp(options.method, "POST"))
        append_format(request, "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: %zu\r\n", body.length);
    append(request, options.headers.text, options.headers.length);
    append(request, "\r\n", 2);
    size_t start = request->length;
    append(request, body.text, body.length);
    char digits[16];
    snprintf(digits, sizeof digits, "%06d", connection->number % 1000000);
    for (size_t at = 0; at < id_places.length; at += sizeof(size_t)) {
        size_t place;
        memcpy(&place, id_places.text + at, sizeof place);
        memcpy(request->text + start + place, digits, 6);
    }
}

static void send_rest(Connection *connection)
{
    while (connection->sent < connection->request.length) {
        ssize_t count = send(connection->fd, connection->request.text + connection->sent, connection->request.length - connection->sent,
                             MSG_NOSIGNAL);
        if (count >= 0) {
            connection->sent += (size_t)count;
        } else if (errno == EAGAIN) {
            if (!connection->awaits_writable)
                watch(connection, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            connection->awaits_writable = true;
            return;
        } else if (errno != EINTR) {
            break; /* The next read says that the connection is gone. */
        }
    }
    if (connection->awaits_writable)
        watch(connection, read_events(connection), EPOLL_CTL_MOD);
    connection->awaits_writable = false;
    if (connection->state == SENDING)
        connection->state = READING_HEADERS;
}

static void start_request(Connection *connection, Nanoseconds t)
{
    connection->number = (int)totals.issued++;
    connection->sent = connection->headers.length = connection->line.length = 0;
    connection->status = 0;
    connection->keeps_alive = connection->is_active = true;
    connection->awaits_writable = connection->has_event = connection->has_content = connection->is_done = false;
    connection->tokens = -1;
    connection->finishes = connection->contents = connection->errors = connection->after_done = 0;
    connection->sent_at = connection->next_slow_read = t;
    if (++totals.active > totals.max_active)
        totals.max_active = totals.active;
    write_request(connection);
    connection->state = SENDING;
    watch(connection, read_events(connection), EPOLL_CTL_MOD);
    send_rest(connection);
}

/* ---- What a stream says ---- */

static void keep_error(const char *prefix, const char *text, size_t length)
{
    if (!totals.error_sample[0])
        snprintf(totals.error_sample, sizeof totals.error_sample, "%s%.*s", prefix, (int)length, text);
}

/* The text behind the next `name` and the spaces that follow it; NULL when there is none before `end`. */
static const char *value_after(const char *from, const char *end, const char *name)
{
    size_t length = strlen(name);
    const char *found = from < end ? memmem(from, (size_t)(end - from), name, length) : NULL;
    if (!found)
        return NULL;
    for (found += length; found < end && *found == ' ';)
        found++;
    return found;
}

/* Whether one of the strings with this name is not empty. */
static bool has_text(const char *data, const char *end, const char *name)
{
    for (const char *value = data; (value = value_after(value, end, name));)
        if (value + 1 < end && value[0] == '"' && value[1] != '"')
            return true;
    return false;
}

static void count_finishes(Connection *connection, const char *data, const char *end)
{
    for (const char *value = data; (value = value_after(value, end, "finish_reason\":"));) {
        if (value >= end || *value != '"')
            continue;
        connection->finishes++;
        size_t left = (size_t)(end - value);
        if (left >= 7 && !memcmp(value, "\"length", 7))
            totals.finish_length++;
        else if (left >= 5 && !memcmp(value, "\"stop", 5))
            totals.finish_stop++;
        else
            totals.finish_other++;
    }
}

static void read_tokens(Connection *connection, const char *data, const char *end)
{
    const char *value = value_after(data, end, "\"completion_tokens\":");
    long tokens = value && value < end ? strtol(value, NULL, 10) : -1;
    if (tokens > connection->tokens)
        connection->tokens = tokens;
}

static void on_data(Connection *connection, const char *data, size_t length, Nanoseconds t)
{
    const char *end = data + length;
    totals.events++;
    if (connection->has_event)
        record(&totals.gap, t - connection->last_event_at);
    else
        record(&totals.first_event, t - connection->sent_at);
    connection->has_event = true;
    connection->last_event_at = t;
    if (connection->is_done)
        connection->after_done++;
    if (length == 6 && !memcmp(data, "[DONE]", 6)) {
        connection->is_done = true;
        return;
    }
    if (has_text(data, end, "content\":") || has_text(data, end, "\"text\":")) {
        totals.contents++;
        connection->contents++;
        if (!connection->has_content)
            record(&totals.first_content, t - connection->sent_at);
        connection->has_content = true;
    }
    count_finishes(connection, data, end);
    read_tokens(connection, data, end);
    if ((length > 8 && !memcmp(data, "{\"error\"", 8)) || memmem(data, length < 200 ? length : 200, "\"error\":{", 9)) {
        connection->errors++;
        keep_error("", data, length);
    }
}

static void on_line(Connection *connection, const char *line, size_t length, Nanoseconds t)
{
    if (length && line[length - 1] == '\r')
        length--;
    if (!length)
        return;
    if (dump)
        fprintf(dump, "%d\t%.6f\t%.*s\n", connection->number, seconds(t - totals.begin), (int)length, line);
    if (length >= 12 && !memcmp(line, "event: error", 12))
        connection->errors++;
    if (length < 5 || memcmp(line, "data:", 5))
        return;
    size_t skipped = length > 5 && line[5] == ' ' ? 6 : 5;
    on_data(connection, line + skipped, length - skipped, t);
}

static void on_body(Connection *connection, const char *text, size_t length, Nanoseconds t)
{
    totals.body_bytes += length;
    if (connection->status != 200 || options.plain) {
        append(&connection->line, text, length);
        return;
    }
    for (const char *end; length && (end = memchr(text, '\n', length));) {
        size_t part = (size_t)(end - text);
        if (connection->line.length) {
            append(&connection->line, text, part);
            on_line(connection, connection->line.text, connection->line.length, t);
            connection->line.length = 0;
        } else {
            on_line(connection, text, part, t);
        }
        text += part + 1;
        length -= part + 1;
    }
    if (length)
        append(&connection->line, text, length);
}

/* ---- HTTP ---- */

/* The value of a header, up to the end of its line; NULL when there is none. */
static const char *header(const Connection *connection, const char *name)
{
    size_t length = strlen(name);
    for (const char *line = connection->headers.text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (!strncasecmp(line, name, length) && line[length] == ':')
            return line + length + 1;
    }
    return NULL;
}

static bool header_contains(const Connection *connection, const char *name, const char *word)
{
    const char *value = header(connection, name), *found = value ? strcasestr(value, word) : NULL;
    return found && found < value + strcspn(value, "\r\n");
}

/* Takes what belongs to the headers, and says how much that was. */
static size_t take_headers(Connection *connection, const char *text, size_t length)
{
    size_t before = connection->headers.length;
    append(&connection->headers, text, length);
    /* The end may have begun in the last three bytes of what came before. */
    const char *end = strstr(connection->headers.text + (before < 3 ? 0 : before - 3), "\r\n\r\n");
    if (!end)
        return length;
    connection->headers.length = (size_t)(end - connection->headers.text) + 4;
    connection->headers.text[connection->headers.length] = 0;
    size_t taken = connection->headers.length - before;
    connection->status = connection->headers.length > 12 ? atoi(connection->headers.text + 9) : 0;
    if (connection->status == 100) {
        connection->headers.length = 0;
        return taken;
    }
    const char *content_length = header(connection, "content-length");
    connection->keeps_alive = !header_contains(connection, "connection", "close");
    connection->state = READING_BODY;
    connection->size_length = 0;
    connection->trailer_has_text = false;
    if (header_contains(connection, "transfer-encoding", "chunked")) {
        connection->framing = CHUNK_SIZE;
    } else if (content_length) {
        connection->framing = FIXED_LENGTH;
        connection->remaining = strtoull(content_length, NULL, 10);
    } else {
        connection->framing = UNTIL_CLOSE;
        connection->keeps_alive = false;
    }
    return taken;
}

static void end_chunk_size(Connection *connection)
{
    char *end;
    connection->size_text[connection->size_length] = 0;
    connection->remaining = strtoull(connection->size_text, &end, 16);
    if (end == connection->size_text)
        totals.protocol_errors++;
    connection->size_length = 0;
    connection->framing = connection->remaining ? CHUNK_DATA : TRAILER;
}

/* Takes what belongs to the body, says how much that was, and whether the body is complete. */
static size_t take_body(Connection *connection, const char *text, size_t length, Nanoseconds t, bool *is_complete)
{
    size_t at = 0;
    *is_complete = connection->framing == FIXED_LENGTH && !connection->remaining;
    while (at < length && !*is_complete) {
        char byte = text[at];
        switch (connection->framing) {
        case CHUNK_SIZE:
            at++;
            if (byte == '\n')
                end_chunk_size(connection);
            else if (byte != '\r' && connection->size_length < (int)sizeof connection->size_text - 1)
                connection->size_text[connection->size_length++] = byte;
            break;
        case CHUNK_END:
            at++;
            if (byte == '\n')
                connection->framing = CHUNK_SIZE;
            else if (byte != '\r')
                totals.protocol_errors++;
            break;
        case TRAILER:
            at++;
            if (byte == '\n') {
                *is_complete = !connection->trailer_has_text;
                connection->trailer_has_text = false;
            } else if (byte != '\r') {
                connection->trailer_has_text = true;
            }
            break;
        case CHUNK_DATA:
        case FIXED_LENGTH: {
            size_t part = length - at < connection->remaining ? length - at : (size_t)connection->remaining;
            on_body(connection, text + at, part, t);
            at += part;
            connection->remaining -= part;
            if (connection->remaining)
                break;
            if (connection->framing == CHUNK_DATA)
                connection->framing = CHUNK_END;
            else
                *is_complete = true;
            break;
        }
        case UNTIL_CLOSE:
            on_body(connection, text + at, length - at, t);
            at = length;
            break;
        }
    }
    return at;
}

/* ---- The end of a request ---- */

static bool count_if(bool is_wrong, long *counter)
{
    *counter += is_wrong;
    return !is_wrong;
}

static bool check_reply(Connection *connection, Nanoseconds t)
{
    if (options.plain) {
        if (connection->line.length)
            read_tokens(connection, connection->line.text, connection->line.text + connection->line.length);
        connection->is_done = true;
    } else if (connection->line.length) {
        on_line(connection, connection->line.text, connection->line.length, t);
    }
    bool has_usage = connection->tokens >= 0, expects_tokens = options.expected_tokens >= 0;
    if (has_usage)
        totals.tokens += (uint64_t)connection->tokens;
    bool ok = count_if(!connection->is_done, &totals.not_done);
    ok &= count_if(connection->after_done > 0, &totals.after_done);
    ok &= count_if(connection->errors > 0, &totals.error_events);
    ok &= count_if(!has_usage, &totals.no_usage) || !expects_tokens;
    ok &= count_if(has_usage && expects_tokens && connection->tokens != options.expected_tokens, &totals.token_mismatches);
    ok &= count_if(options.expected_finishes >= 0 && connection->finishes != options.expected_finishes, &totals.finish_mismatches);
    ok &= count_if(options.expected_contents >= 0 && connection->contents != options.expected_contents, &totals.content_mismatches);
    return ok;
}

static void finish_request(Connection *connection, Nanoseconds t, bool is_complete)
{
    connection->is_active = false;
    totals.active--;
    totals.finished++;
    totals.end = t;
    record(&totals.total, t - connection->sent_at);
    if (connection->status >= 0 && connection->status < MAX_STATUS)
        totals.statuses[connection->status]++;
    bool ok = count_if(!is_complete, &totals.truncated);
    if (connection->status == 200) {
        ok &= check_reply(connection, t);
    } else {
        ok = false;
        totals.http_errors++;
        char prefix[32];
        snprintf(prefix, sizeof prefix, "HTTP %d: ", connection->status);
        if (connection->line.length)
            keep_error(prefix, connection->line.text, connection->line.length);
    }
    totals.ok += ok;
    if (!connection->keeps_alive || !is_complete)
        close_connection(connection);
    if (totals.issued >= options.requests) {
        if (connection->fd >= 0) {
            connection->state = IDLE;
            watch(connection, 0, EPOLL_CTL_MOD);
        }
    } else if (connection->fd < 0) {
        totals.reconnects++;
        begin_connecting(connection);
    } else {
        start_request(connection, t);
    }
}

/* Returns whether the request is over. */
static bool take(Connection *connection, const char *text, size_t length, Nanoseconds t)
{
    while (length || (connection->state == READING_BODY && connection->framing == FIXED_LENGTH && !connection->remaining)) {
        size_t taken;
        bool is_complete = false;
        if (connection->state == READING_BODY) {
            taken = take_body(connection, text, length, t, &is_complete);
        } else {
            connection->state = READING_HEADERS; /* A reply may come before the request is sent. */
            taken = take_headers(connection, text, length);
        }
        text += taken;
        length -= taken;
        if (is_complete) {
            totals.protocol_errors += length > 0;
            finish_request(connection, t, true);
            return true;
        }
    }
    return false;
}

/* Reads what is there; at most `limit` bytes unless that is 0. */
static void read_connection(Connection *connection, size_t limit)
{
    for (size_t got = 0; !limit || got < limit;) {
        size_t wanted = limit && limit - got < READ_BYTES ? limit - got : READ_BYTES;
        ssize_t count = recv(connection->fd, read_buffer, wanted, 0);
        Nanoseconds t = now();
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EAGAIN)
            return;
        if (count <= 0) {
            connection->keeps_alive = false;
            if (connection->is_active)
                finish_request(connection, t, connection->state == READING_BODY && connection->framing == UNTIL_CLOSE);
            else
                close_connection(connection);
            return;
        }
        read_buffer[count] = 0; /* Numbers are read up to the first byte that is no digit. */
        totals.reads++;
        totals.bytes += (uint64_t)count;
        got += (size_t)count;
        /* epoll tells again what is left, so a read that is not full needs no second one. */
        if (take(connection, read_buffer, (size_t)count, t) || (!limit && (size_t)count < READ_BYTES))
            return;
    }
}

/* ---- The run ---- */

static double open_connections(void)
{
    static struct epoll_event events[MAX_EVENTS];
    Nanoseconds began = now();
    int opened = 0, ready = 0;
    while (ready < options.concurrency) {
        for (; opened < options.concurrency && opened - ready < MAX_CONNECTING; opened++) {
            connections[opened].is_slow = opened < options.slow;
            begin_connecting(&connections[opened]);
        }
        int count = epoll_wait(poller, events, MAX_EVENTS, 1000);
        for (int i = 0; i < count; i++) {
            Connection *connection = events[i].data.ptr;
            if (connection->state != CONNECTING)
                continue;
            if ((errno = connect_error(connection)))
                fail("connect");
            connection->state = IDLE;
            watch(connection, 0, EPOLL_CTL_MOD);
            ready++;
        }
        if (now() - began > CONNECT_SECONDS * NS_PER_S) {
            fprintf(stderr, "sseload: only %d of %d connections after %d s\n", ready, options.concurrency, CONNECT_SECONDS);
            exit(2);
        }
    }
    return seconds(now() - began);
}

static void on_reconnected(Connection *connection)
{
    if (connect_error(connection)) {
        totals.connect_errors++;
        close_connection(connection);
        totals.issued++;
        totals.finished++;
        if (totals.issued < options.requests)
            begin_connecting(connection);
    } else if (totals.issued < options.requests) {
        start_request(connection, now());
    } else {
        connection->state = IDLE;
        watch(connection, 0, EPOLL_CTL_MOD);
    }
}

static void on_event(Connection *connection, uint32_t events)
{
    bool is_gone = events & (EPOLLHUP | EPOLLERR);
    if (connection->state == CLOSED)
        return;
    if (connection->state == CONNECTING) {
        on_reconnected(connection);
    } else if (connection->state == IDLE) {
        if (is_gone)
            close_connection(connection);
    } else {
        if ((events & EPOLLOUT) && connection->awaits_writable)
            send_rest(connection);
        if (is_gone || ((events & EPOLLIN) && !connection->is_slow))
            read_connection(connection, 0);
    }
}

static void read_slow_connections(Nanoseconds t)
{
    for (int i = 0; i < options.slow && i < options.concurrency; i++) {
        Connection *connection = &connections[i];
        if (!connection->is_active || connection->state == SENDING || t < connection->next_slow_read)
            continue;
        connection->next_slow_read = t + (Nanoseconds)options.slow_ms * NS_PER_MS;
        read_connection(connection, (size_t)options.slow_bytes);
    }
}

static void give_up(Nanoseconds t)
{
    for (int i = 0; i < options.concurrency; i++) {
        totals.timed_out += connections[i].is_active;
        totals.not_done += connections[i].is_active && connections[i].status == 200 && !connections[i].is_done;
    }
    totals.end = t;
}

static void run(void)
{
    static struct epoll_event events[MAX_EVENTS];
    totals.begin = now();
    Nanoseconds next_sample = totals.begin + SAMPLE_MS * NS_PER_MS;
    int launched = 0;
    while (totals.finished < options.requests) {
        Nanoseconds t = now();
        for (; launched < options.concurrency && seconds(t - totals.begin) >= options.ramp * launched / options.concurrency; launched++)
            start_request(&connections[launched], options.ramp > 0 ? t : now());
        int wait_ms = launched < options.concurrency ? 1 : SAMPLE_MS;
        if (options.slow) {
            read_slow_connections(t);
            int slow_ms = options.slow_ms < 5 ? options.slow_ms : 5;
            wait_ms = wait_ms < slow_ms ? wait_ms : slow_ms;
        }
        int count = epoll_wait(poller, events, MAX_EVENTS, wait_ms);
        if (count < 0 && errno != EINTR)
            fail("epoll_wait");
        for (int i = 0; i < count; i++)
            on_event(events[i].data.ptr, events[i].events);
        t = now();
        if (t < next_sample)
            continue;
        next_sample = t + SAMPLE_MS * NS_PER_MS;
        sample_processes();
        if (seconds(t - totals.begin) > options.timeout) {
            give_up(t);
            return;
        }
    }
}

/* ---- Results ---- */

static void print_string(const char *name, const char *text)
{
    printf("\"%s\":\"", name);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            putchar('\\');
        putchar((unsigned char)*text < 32 ? ' ' : *text);
    }
    putchar('"');
}

static void print_durations(const char *name, const Durations *durations, const char *const *percentiles)
{
    printf("\"%s\":{", name);
    for (; *percentiles; percentiles++) {
        double share = strtod(*percentiles, NULL);
        /* 0.5 is p50, 0.999 is p999. */
        printf("\"p%s%s\":%.3f,", *percentiles + 2, strlen(*percentiles) == 3 ? "0" : "", milliseconds_at(durations, share));
    }
    printf("\"max\":%.3f},", (double)durations->max / NS_PER_MS);
}

static void print_counts(void)
{
    printf("\"concurrency\":%d,\"active_max\":%ld,\"requests\":%d,\"finished\":%ld,\"ok\":%ld,\"http_error\":%ld,\"no_done\":%ld,",
           options.concurrency, totals.max_active, options.requests, totals.finished, totals.ok, totals.http_errors, totals.not_done);
    printf("\"truncated\":%ld,\"error_events\":%ld,\"after_done\":%ld,\"usage_missing\":%ld,\"token_mismatch\":%ld,", totals.truncated,
           totals.error_events, totals.after_done, totals.no_usage, totals.token_mismatches);
    printf("\"finish_mismatch\":%ld,\"content_mismatch\":%ld,\"timed_out\":%ld,\"conn_errors\":%ld,\"reconnects\":%ld,\"proto_errors\":%ld,",
           totals.finish_mismatches, totals.content_mismatches, totals.timed_out, totals.connect_errors, totals.reconnects,
           totals.protocol_errors);
    printf("\"finish_length\":%ld,\"finish_stop\":%ld,\"finish_other\":%ld,\"status\":{", totals.finish_length, totals.finish_stop,
           totals.finish_other);
    const char *separator = "";
    for (int status = 0; status < MAX_STATUS; status++) {
        if (!totals.statuses[status])
            continue;
        printf("%s\"%d\":%ld", separator, status, totals.statuses[status]);
        separator = ",";
    }
    printf("},");
}

static void print_processes(double tokens)
{
    double tick = (double)sysconf(_SC_CLK_TCK);
    printf(",\"cpu\":{");
    for (int i = 0; i < process_count; i++) {
        double user = (double)(processes[i].end.user - processes[i].begin.user) / tick;
        double system = (double)(processes[i].end.system - processes[i].begin.system) / tick, cpu = user + system;
        printf("%s\"%s\":{\"pid\":%d,\"user_s\":%.2f,\"sys_s\":%.2f,\"cpu_s\":%.2f,\"us_per_token\":%.3f,\"us_per_event\":%.3f,", i ? "," : "",
               processes[i].name, processes[i].pid, user, system, cpu, tokens > 0 ? cpu * 1e6 / tokens : 0,
               totals.events ? cpu * 1e6 / (double)totals.events : 0);
        printf("\"rss_start_mb\":%.1f,\"rss_max_mb\":%.1f,\"rss_end_mb\":%.1f}", (double)processes[i].begin.resident_kb / 1024,
               (double)processes[i].max_resident_kb / 1024, (double)processes[i].end.resident_kb / 1024);
    }
    printf("}");
}

static double cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void print_results(double connect_seconds, double client_cpu)
{
    double wall = seconds(totals.end - totals.begin), events = (double)totals.events;
    double tokens = (double)(totals.tokens ? totals.tokens : totals.contents);
    putchar('{');
    print_string("label", options.label);
    putchar(',');
    print_string("path", options.path);
    putchar(',');
    print_counts();
    printf("\"connect_s\":%.3f,\"wall_s\":%.6f,\"usage_tokens\":%llu,\"events\":%llu,\"content_events\":%llu,\"token_source\":\"%s\",",
           connect_seconds, wall, (unsigned long long)totals.tokens, (unsigned long long)totals.events, (unsigned long long)totals.contents,
           totals.tokens ? "usage" : "content_events");
    printf("\"tokens_per_s\":%.1f,\"events_per_s\":%.1f,\"req_per_s\":%.2f,", tokens / wall, events / wall, (double)totals.finished / wall);
    printf("\"bytes\":%llu,\"body_bytes\":%llu,\"bytes_per_event\":%.1f,\"reads\":%llu,\"events_per_read\":%.2f,",
           (unsigned long long)totals.bytes, (unsigned long long)totals.body_bytes, events > 0 ? (double)totals.body_bytes / events : 0,
           (unsigned long long)totals.reads, totals.reads ? events / (double)totals.reads : 0);
    print_durations("ttft_ms", &totals.first_event, (const char *const[]){"0.5", "0.9", "0.99", NULL});
    print_durations("ttfc_ms", &totals.first_content, (const char *const[]){"0.5", "0.99", NULL});
    print_durations("gap_ms", &totals.gap, (const char *const[]){"0.5", "0.9", "0.99", "0.999", NULL});
    print_durations("total_ms", &totals.total, (const char *const[]){"0.5", "0.99", NULL});
    printf("\"client_cpu_s\":%.3f,\"client_us_per_token\":%.3f", client_cpu, tokens > 0 ? client_cpu * 1e6 / tokens : 0);
    if (process_count)
        print_processes(tokens);
    if (totals.error_sample[0]) {
        putchar(',');
        print_string("error_sample", totals.error_sample);
    }
    printf("}\n");
    if (!options.quiet)
        fprintf(stderr, "%s c=%d ok %ld/%d, %.0f tokens/s, first event p50 %.1f p99 %.1f ms, gap p99 %.2f ms, %.2f s, client %.2f CPU-s\n",
                options.label, options.concurrency, totals.ok, options.requests, tokens / wall, milliseconds_at(&totals.first_event, .5),
                milliseconds_at(&totals.first_event, .99), milliseconds_at(&totals.gap, .99), wall, client_cpu);
}

/* ---- The start ---- */

static void add_process(char *text)
{
    char *separator = strchr(text, '=');
    if (!separator || process_count == MAX_PROCESSES) {
        fprintf(stderr, "sseload: --cpu %s: NAME=PID is needed, at most %d times\n", text, MAX_PROCESSES);
        exit(2);
    }
    *separator = 0;
    processes[process_count].name = text;
    processes[process_count++].pid = atoi(separator + 1);
}

enum {
    EXPECT_TOKENS = 256, EXPECT_FINISHES, EXPECT_CONTENT, CPU, TIMEOUT, SLOW, SLOW_BYTES, SLOW_MS, RCVBUF, RAMP, DUMP, QUIET, NON_STREAM,
    METHOD,
};

static const struct option LONG_OPTIONS[] = {
    {"expect-tokens", 1, 0, EXPECT_TOKENS}, {"expect-finishes", 1, 0, EXPECT_FINISHES}, {"expect-content", 1, 0, EXPECT_CONTENT},
    {"cpu", 1, 0, CPU}, {"timeout", 1, 0, TIMEOUT}, {"slow", 1, 0, SLOW}, {"slow-bytes", 1, 0, SLOW_BYTES}, {"slow-ms", 1, 0, SLOW_MS},
    {"rcvbuf", 1, 0, RCVBUF}, {"ramp", 1, 0, RAMP}, {"dump", 1, 0, DUMP}, {"quiet", 0, 0, QUIET}, {"non-stream", 0, 0, NON_STREAM},
    {"method", 1, 0, METHOD}, {0},
};

static void parse_options(int argc, char **argv)
{
    int option;
    while ((option = getopt_long(argc, argv, "h:p:u:b:c:n:H:l:", LONG_OPTIONS, NULL)) != -1) {
        switch (option) {
        case 'h': options.host = optarg; break;
        case 'p': options.port = atoi(optarg); break;
        case 'u': options.path = optarg; break;
        case 'b': options.body_file = optarg; break;
        case 'c': options.concurrency = atoi(optarg); break;
        case 'n': options.requests = atoi(optarg); break;
        case 'l': options.label = optarg; break;
        case 'H': append_format(&options.headers, "%s\r\n", optarg); break;
        case EXPECT_TOKENS: options.expected_tokens = atol(optarg); break;
        case EXPECT_FINISHES: options.expected_finishes = atol(optarg); break;
        case EXPECT_CONTENT: options.expected_contents = atol(optarg); break;
        case CPU: add_process(optarg); break;
        case TIMEOUT: options.timeout = atof(optarg); break;
        case SLOW: options.slow = atoi(optarg); break;
        case SLOW_BYTES: options.slow_bytes = atoi(optarg); break;
        case SLOW_MS: options.slow_ms = atoi(optarg); break;
        case RCVBUF: options.receive_bytes = atoi(optarg); break;
        case RAMP: options.ramp = atof(optarg); break;
        case DUMP: options.dump_file = optarg; break;
        case QUIET: options.quiet = true; break;
        case NON_STREAM: options.plain = true; break;
        case METHOD: options.method = optarg; break;
        default: fputs(HELP, stderr); exit(2);
        }
    }
    if (options.requests < 1 || options.concurrency < 1 || options.slow_bytes < 1) {
        fputs(HELP, stderr);
        exit(2);
    }
    if (options.concurrency > options.requests)
        options.concurrency = options.requests;
}

static void read_body(void)
{
    append(&body, "", 0);
    append(&id_places, "", 0);
    append(&options.headers, "", 0);
    if (!options.body_file)
        return;
    FILE *file = fopen(options.body_file, "rb");
    if (!file)
        fail(options.body_file);
    char piece[65536];
    for (size_t count; (count = fread(piece, 1, sizeof piece, file));)
        append(&body, piece, count);
    if (ferror(file))
        fail(options.body_file);
    fclose(file);
    for (char *found = body.text; (found = strstr(found, "@@ID@@")); found += 6) {
        size_t place = (size_t)(found - body.text);
        append(&id_places, (const char *)&place, sizeof place);
    }
}

static void find_address(void)
{
    if (!strncmp(options.host, "unix:", 5)) {
        struct sockaddr_un *path = (struct sockaddr_un *)&address;
        path->sun_family = AF_UNIX;
        snprintf(path->sun_path, sizeof path->sun_path, "%s", options.host + 5);
        address_length = sizeof *path;
        options.host = "localhost";
        return;
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    char port[16];
    snprintf(port, sizeof port, "%d", options.port);
    if (getaddrinfo(options.host, port, &hints, &found)) {
        fprintf(stderr, "sseload: no address for %s\n", options.host);
        exit(2);
    }
    memcpy(&address, found->ai_addr, found->ai_addrlen);
    address_length = found->ai_addrlen;
    freeaddrinfo(found);
}

int main(int argc, char **argv)
{
    parse_options(argc, argv);
    read_body();
    find_address();
    if (options.dump_file && !(dump = fopen(options.dump_file, "w")))
        fail(options.dump_file);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    read_buffer = malloc(READ_BYTES + 1);
    connections = calloc((size_t)options.concurrency, sizeof *connections);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (!read_buffer || !connections || poller < 0)
        fail("start");
    double connect_seconds = open_connections();
    begin_processes();
    double client_cpu = cpu_seconds();
    run();
    client_cpu = cpu_seconds() - client_cpu;
    sample_processes();
    print_results(connect_seconds, client_cpu);
    return totals.ok == options.requests ? 0 : 3;
}
