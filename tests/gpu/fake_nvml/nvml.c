/*
 * A libnvidia-ml.so.1 for tests: answers from a scenario file, read again whenever it changes.
 *
 * FAKE_NVML_SCENARIO names the file; without the file there is no driver. FAKE_NVML_LOG, when set, gets a
 * line for every init, every event set that is waited for, and every shutdown. FAKE_NVML_CALLS, when set, gets
 * the number of calls by name at shutdown. A scenario has one "key value" a line; '#' starts a comment line:
 *
 *   driver 580.65.06
 *   gpu0.uuid GPU-...          a GPU exists where it has a uuid; indices start at 0
 *   gpu0.power 123456          readings in NVML's own units; a reading without a line is NOT_SUPPORTED
 *   gpu0.field74 123           a field value; gpu0.!field74 3 fails with a code of its own
 *   gpu0.!several 2            several field values in one call fail with code 2
 *   gpu0.limit1 96             a temperature threshold by its number
 *   gpu0.processes 12:1024,13:na         process ids and bytes; graphics in the same way
 *   event0 1 79                GPU 1 has Xid 79; told once, if it is new while somebody waits
 *   gpu0.mig0.uuid MIG-...     a MIG slice of GPU 0; gpu0.mig 1 turns the mode on
 *   gpu0.!nvmlDeviceGetPowerUsage 3     this call on this GPU fails with code 3
 *   gpu0.!* 15                          every call on this GPU fails
 *   !nvmlInitWithFlags 9                this call fails wherever it is made
 *
 * In place of a code, "hang" never returns and "crash" is a segmentation fault.
 */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9 };
enum { TIMED_OUT = 10 };
enum { GPUS = 64, SLICES = 7, CARD = -1 };

struct device {
    int gpu, slice;
};
typedef struct device *device_t;

static struct device cards[GPUS], slices[GPUS][SLICES];
static int initialized;
static char scenario[1 << 18];

static int load(void) {
    static struct timespec loaded;
    static off_t size = -1;
    static ino_t inode;
    const char *path = getenv("FAKE_NVML_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now) != 0)
        return 0;
    if (now.st_size == size && now.st_ino == inode && !memcmp(&now.st_mtim, &loaded, sizeof loaded))
        return 1;
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    scenario[0] = '\n';
    size_t got = fread(scenario + 1, 1, sizeof scenario - 2, file);
    scenario[got + 1] = 0;
    fclose(file);
    loaded = now.st_mtim, size = now.st_size, inode = now.st_ino;
    return 1;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* events are waited for in a thread of its own */

/* The value of a key, copied into out; 0 where there is none. */
static int lookup(const char *key, char *out, size_t length) {
    char wanted[160];
    snprintf(wanted, sizeof wanted, "\n%s ", key);
    pthread_mutex_lock(&lock);
    const char *line = load() ? strstr(scenario, wanted) : NULL;
    if (line) {
        line += strlen(wanted);
        size_t end = strcspn(line, "\n");
        if (end >= length)
            end = length - 1;
        memcpy(out, line, end);
        out[end] = 0;
    }
    pthread_mutex_unlock(&lock);
    return line != NULL;
}

static void device_key(device_t device, const char *name, char *out, size_t length) {
    if (device->slice == CARD)
        snprintf(out, length, "gpu%d.%s", device->gpu, name);
    else
        snprintf(out, length, "gpu%d.mig%d.%s", device->gpu, device->slice, name);
}

static int device_text(device_t device, const char *name, char *out, size_t length) {
    char key[128];
    device_key(device, name, key, sizeof key);
    return lookup(key, out, length);
}

static int misbehave(const char *what) {
    if (!strcmp(what, "hang"))
        for (;;)
            pause();
    if (!strcmp(what, "crash")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    return atoi(what);
}

static struct {
    const char *name;
    unsigned long count;
} calls[64];

static void count(const char *call) {
    int i = 0;
    pthread_mutex_lock(&lock);
    while (calls[i].name && strcmp(calls[i].name, call))
        i++;
    calls[i].name = call;
    calls[i].count++;
    pthread_mutex_unlock(&lock);
}

/* What the scenario wants this call to return before it looks at any reading. */
static int begin(const char *call, device_t device) {
    char name[128], key[160], what[32];
    count(call);
    if (device) {
        snprintf(name, sizeof name, "!%s", call);
        if (device_text(device, name, what, sizeof what) || device_text(device, "!*", what, sizeof what))
            return misbehave(what);
    }
    snprintf(key, sizeof key, "!%s", call);
    if (lookup(key, what, sizeof what))
        return misbehave(what);
    return initialized ? OK : UNINITIALIZED;
}

static int number(device_t device, const char *name, unsigned long long *out) {
    char text[64];
    if (!device_text(device, name, text, sizeof text))
        return NOT_SUPPORTED;
    *out = strtoull(text, NULL, 0);
    return OK;
}

static int reading32(const char *call, device_t device, const char *name, unsigned *out) {
    unsigned long long value = 0;
    int code = begin(call, device);
    if (code == OK && (code = number(device, name, &value)) == OK)
        *out = (unsigned)value;
    return code;
}

static int reading64(const char *call, device_t device, const char *name, unsigned long long *out) {
    int code = begin(call, device);
    return code == OK ? number(device, name, out) : code;
}

static int text(const char *call, device_t device, const char *name, char *out, unsigned length) {
    int code = begin(call, device);
    if (code == OK && !device_text(device, name, out, length))
        return NOT_SUPPORTED;
    return code;
}

static void note(const char *what) {
    const char *path = getenv("FAKE_NVML_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", what);
        fclose(file);
    }
}

int nvmlInitWithFlags(unsigned flags) {
    char what[32];
    (void)flags;
    if (!load())
        return NO_DRIVER;
    if (lookup("!nvmlInitWithFlags", what, sizeof what))
        return misbehave(what);
    for (int gpu = 0; gpu < GPUS; gpu++) {
        cards[gpu] = (struct device){gpu, CARD};
        for (int slice = 0; slice < SLICES; slice++)
            slices[gpu][slice] = (struct device){gpu, slice};
    }
    initialized = 1;
    note("init");
    return OK;
}

int nvmlShutdown(void) {
    const char *path = getenv("FAKE_NVML_CALLS");
    FILE *file = path ? fopen(path, "w") : NULL;
    for (int i = 0; file && calls[i].name; i++)
        fprintf(file, "%s %lu\n", calls[i].name, calls[i].count);
    if (file)
        fclose(file);
    initialized = 0;
    note("shutdown");
    return OK;
}

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    int code = begin("nvmlSystemGetDriverVersion", NULL);
    if (code == OK && !lookup("driver", out, length))
        return NOT_SUPPORTED;
    return code;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char ignored[128];
    int code = begin("nvmlDeviceGetCount_v2", NULL);
    if (code != OK)
        return code;
    *count = 0;
    for (int gpu = 0; gpu < GPUS; gpu++) {
        struct device card = {gpu, CARD};
        if (device_text(&card, "uuid", ignored, sizeof ignored))
            *count = gpu + 1;
    }
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    if (index >= GPUS)
        return INVALID;
    *device = &cards[index];
    return begin("nvmlDeviceGetHandleByIndex_v2", *device);
}

int nvmlDeviceGetUUID(device_t device, char *out, unsigned length) {
    return text("nvmlDeviceGetUUID", device, "uuid", out, length);
}

int nvmlDeviceGetName(device_t device, char *out, unsigned length) {
    char raw[32];
    if (device_text(device, "name_byte", raw, sizeof raw)) { /* a name that is no UTF-8 */
        out[0] = (char)strtol(raw, NULL, 0);
        out[1] = 0;
        return OK;
    }
    return text("nvmlDeviceGetName", device, "name", out, length);
}

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(device_t device, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    return text("nvmlDeviceGetPciInfo_v3", device, "pci", info->bus_id, sizeof info->bus_id);
}

struct utilization {
    unsigned gpu, memory;
};

int nvmlDeviceGetUtilizationRates(device_t device, struct utilization *out) {
    unsigned long long memory = 0;
    number(device, "utilization_memory", &memory);
    out->memory = (unsigned)memory;
    return reading32("nvmlDeviceGetUtilizationRates", device, "utilization", &out->gpu);
}

struct memory_v1 {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo(device_t device, struct memory_v1 *out) {
    unsigned long long used = 0, reserved = 0;
    int code = reading64("nvmlDeviceGetMemoryInfo", device, "memory_total", &out->total);
    number(device, "memory_used", &used);
    number(device, "memory_reserved", &reserved);
    out->used = used + reserved;
    out->free = out->total - out->used;
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *out) {
    int code = reading64("nvmlDeviceGetMemoryInfo_v2", device, "memory_total", &out->total);
    if (code == OK)
        code = number(device, "memory_used", &out->used);
    if (code == OK)
        code = number(device, "memory_reserved", &out->reserved);
    out->free = out->total - out->used - out->reserved;
    return code;
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned *out) {
    return reading32("nvmlDeviceGetPowerUsage", device, "power", out);
}

int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *out) {
    return reading32("nvmlDeviceGetEnforcedPowerLimit", device, "power_limit", out);
}

int nvmlDeviceGetPowerManagementLimitConstraints(device_t device, unsigned *low, unsigned *high) {
    *low = 0;
    return reading32("nvmlDeviceGetPowerManagementLimitConstraints", device, "power_limit_max", high);
}

int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *out) {
    return reading64("nvmlDeviceGetTotalEnergyConsumption", device, "energy", out);
}

int nvmlDeviceGetTemperature(device_t device, unsigned sensor, unsigned *out) {
    return sensor ? INVALID : reading32("nvmlDeviceGetTemperature", device, "temperature", out);
}

int nvmlDeviceGetFanSpeed(device_t device, unsigned *out) {
    return reading32("nvmlDeviceGetFanSpeed", device, "fan", out);
}

int nvmlDeviceGetClockInfo(device_t device, unsigned type, unsigned *out) {
    static const char *names[] = {"clock_graphics", "clock_sm", "clock_memory", "clock_video"};
    return type > 3 ? INVALID : reading32("nvmlDeviceGetClockInfo", device, names[type], out);
}

int nvmlDeviceGetPerformanceState(device_t device, unsigned *out) {
    return reading32("nvmlDeviceGetPerformanceState", device, "pstate", out);
}

int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *out) {
    return reading64("nvmlDeviceGetCurrentClocksEventReasons", device, "throttle", out);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *out) {
    return reading64("nvmlDeviceGetCurrentClocksThrottleReasons", device, "throttle", out);
}

struct field_value {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type, code;
    union {
        double as_double;
        unsigned as_unsigned;
        unsigned long long as_wide;
    } value;
};

int nvmlDeviceGetFieldValues(device_t device, int count, struct field_value *values) {
    int code = begin("nvmlDeviceGetFieldValues", device);
    char refused[32];
    if (code == OK && count > 1 && device_text(device, "!several", refused, sizeof refused))
        return misbehave(refused);
    for (int i = 0; code == OK && i < count; i++) {
        unsigned long long value = 0;
        char name[32], failing[32], what[32];
        snprintf(name, sizeof name, "field%u", values[i].id);
        snprintf(failing, sizeof failing, "!field%u", values[i].id);
        int is_wide = values[i].id >= 3 && values[i].id <= 4;
        is_wide |= values[i].id >= 74 && values[i].id <= 81;
        is_wide |= values[i].id >= 269 && values[i].id <= 271;
        values[i].type = is_wide ? 3 : 1;
        values[i].code = (unsigned)number(device, name, &value);
        if (device_text(device, failing, what, sizeof what))
            values[i].code = (unsigned)misbehave(what);
        values[i].value.as_wide = value;
    }
    return code;
}

int nvmlDeviceGetTemperatureThreshold(device_t device, unsigned threshold, unsigned *out) {
    char name[32];
    snprintf(name, sizeof name, "limit%u", threshold);
    return reading32("nvmlDeviceGetTemperatureThreshold", device, name, out);
}

struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

static int list(const char *call, device_t device, const char *name, unsigned *length, struct process *out) {
    char text[4096];
    int code = begin(call, device);
    if (code != OK)
        return code;
    if (!device_text(device, name, text, sizeof text))
        return NOT_SUPPORTED;
    unsigned found = 0;
    for (char *rest = text, *part; (part = strsep(&rest, ",")) && *part; found++) {
        if (found < *length && out) {
            char *memory = strchr(part, ':') + 1;
            out[found].pid = (unsigned)strtoul(part, NULL, 0);
            out[found].memory = strcmp(memory, "na") ? strtoull(memory, NULL, 0) : ~0ULL;
        }
    }
    code = found > *length ? TOO_SMALL : OK;
    *length = found;
    return code;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *length, struct process *out) {
    return list("nvmlDeviceGetComputeRunningProcesses_v3", device, "processes", length, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned *length, struct process *out) {
    return list("nvmlDeviceGetGraphicsRunningProcesses_v3", device, "graphics", length, out);
}

static char watched[GPUS];
static int next_event;

static int event(int number, int *gpu, unsigned long long *code) {
    char key[32], text[64];
    snprintf(key, sizeof key, "event%d", number);
    return lookup(key, text, sizeof text) && sscanf(text, "%d %llu", gpu, code) == 2;
}

int nvmlEventSetCreate(void **set) {
    static int one;
    int gpu, code = begin("nvmlEventSetCreate", NULL);
    unsigned long long ignored;
    *set = &one;
    memset(watched, 0, sizeof watched);
    for (next_event = 0; event(next_event, &gpu, &ignored);)
        next_event++;
    return code;
}

int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, void *set) {
    int code = begin("nvmlDeviceRegisterEvents", device);
    (void)set;
    if (code == OK)
        watched[device->gpu] = (types & 8) != 0;
    return code;
}

struct event_data {
    device_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

int nvmlEventSetWait_v2(void *set, struct event_data *out, unsigned milliseconds) {
    static int told;
    int gpu;
    (void)set;
    int code = begin("nvmlEventSetWait_v2", NULL);
    if (code != OK)
        return code;
    if (!told++)
        note("watching");
    for (unsigned waited = 0; waited < milliseconds; waited += 50) {
        if (event(next_event, &gpu, &out->data)) {
            next_event++;
            if (watched[gpu]) {
                out->device = &cards[gpu];
                out->type = 8;
                return OK;
            }
        }
        nanosleep(&(struct timespec){0, 50000000}, NULL);
    }
    return TIMED_OUT;
}

int nvmlEventSetFree(void *set) {
    (void)set;
    return begin("nvmlEventSetFree", NULL);
}

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    int code = reading32("nvmlDeviceGetMigMode", device, "mig", current);
    *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    *count = SLICES;
    return begin("nvmlDeviceGetMaxMigDeviceCount", device);
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *out) {
    char ignored[128];
    int code = begin("nvmlDeviceGetMigDeviceHandleByIndex", device);
    if (code != OK)
        return code;
    if (index >= SLICES || !device_text(&slices[device->gpu][index], "uuid", ignored, sizeof ignored))
        return NOT_FOUND;
    *out = &slices[device->gpu][index];
    return OK;
}
