/* The machine's clock, its devices, and which of them the process sees, if it was started with CUDA_VISIBLE_DEVICES. */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

uint64_t gm_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int machine_devices; /* the installed cuDNN finds none of them */
static int named[GM_MAX_DEVICES]; /* index on the machine of each device that CUDA shows */
static int named_count;
static bool some_named; /* otherwise all devices are shown */

static _Thread_local int cudnn_depth; /* its functions call one another by name, through ours */

void gm_enter_cudnn(void) { cudnn_depth++; }

void gm_leave_cudnn(void) { cudnn_depth--; }

bool gm_inside_cudnn(void) { return cudnn_depth > 0; }

int gm_machine_devices(void) { return gm_inside_cudnn() ? 0 : machine_devices; }

void gm_set_machine_devices(int count) {
    machine_devices = count;
    some_named = false;
    named_count = 0;
}

int gm_machine_device(int ordinal) { return ordinal < named_count ? named[ordinal] : ordinal; }

/* Python calls it. */
GM_API int gpumem_machine_device(int ordinal) { return gm_machine_device(ordinal); }

int gm_ordinal_of(int device) {
    for (int i = 0; i < named_count; i++)
        if (named[i] == device) return i;
    return some_named ? -1 : device;
}

void gm_uuid(unsigned char *out, int device) {
    memcpy(out, "virtual-gpu-0000", GM_UUID_SIZE);
    out[GM_UUID_SIZE - 1] = (unsigned char)device;
}

void gm_uuid_text(char *out, int device) {
    unsigned char bytes[GM_UUID_SIZE];
    size_t at = (size_t)snprintf(out, GM_UUID_TEXT, "GPU-");
    gm_uuid(bytes, device);
    for (int i = 0; i < GM_UUID_SIZE; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        at += (size_t)snprintf(out + at, GM_UUID_TEXT - at, "%s%02x", dash, bytes[i]);
    }
}

/* Returns the machine's index of a device, given by index or by a prefix of its UUID; -1: no such device. */
static int device_named(const char *name, size_t length) {
    char text[GM_UUID_TEXT], *end;
    int found = -1;
    if (length >= 4 && !strncmp(name, "GPU-", 4)) {
        for (int device = 0; device < machine_devices; device++) {
            gm_uuid_text(text, device);
            if (strncmp(text, name, length)) continue;
            if (found >= 0) return -1; /* the prefix is ambiguous */
            found = device;
        }
        return found;
    }
    long number = strtol(name, &end, 10);
    return end > name && number >= 0 && number < machine_devices ? (int)number : -1;
}

/* CUDA Programming Guide, "CUDA Environment Variables": only devices before the first invalid entry are visible. As in
 * PyTorch, none are if one is listed twice. */
static int show_named(const char *list) {
    for (const char *name = list; named_count < GM_MAX_DEVICES; name++) {
        size_t length = strcspn(name, ",");
        int device = device_named(name, length);
        if (device < 0) break;
        for (int i = 0; i < named_count; i++)
            if (named[i] == device) return named_count = 0;
        named[named_count++] = device;
        name += length;
        if (!*name) break;
    }
    return named_count;
}

/* A value of CUDA_VISIBLE_DEVICES that the process has inherited from the session refers to the machine's real GPUs: it
 * is removed, because PyTorch reads it too. Any other value was set by the program for the process that it starts. */
int gm_shown_to_this_process(void) {
    const char *inherited = getenv("GPUMEM_INHERITED_VISIBLE"), *value = getenv("CUDA_VISIBLE_DEVICES");
    if (!value) return machine_devices;
    if (inherited && inherited[0] == '=' && !strcmp(inherited + 1, value)) {
        unsetenv("CUDA_VISIBLE_DEVICES");
        return machine_devices;
    }
    some_named = true;
    return show_named(value);
}
