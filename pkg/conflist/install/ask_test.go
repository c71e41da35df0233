// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

// TestAskEnds: a program that hangs is ended with all that it began, and so is
// one that leaves something behind which holds its output.
func TestAskEnds(t *testing.T) {
	for name, c := range map[string]struct{ script, says string }{
		"hangs":         {"sleep 1000 & echo $! >$0.pid; wait", "no answer within 1s"},
		"leaves others": {"sleep 1000 & echo $! >$0.pid", "left something running"},
	} {
		t.Run(name, func(t *testing.T) {
			source, _ := binDir(t)
			write(t, source, "#!/bin/sh\n"+c.script+"\n", 0o700)
			a := asked{path: source, name: "the plugin", patience: time.Second}
			_, err := a.version(t.Context())
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "--plugin") {
				t.Error(err)
			}
			pid := strings.TrimSpace(content(t, source+".pid"))
			for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				stat, err := os.ReadFile("/proc/" + pid + "/stat")
				if err != nil || strings.Contains(string(stat), ") Z ") {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("process %s lives on: %s", pid, stat)
				}
			}
		})
	}
}

// TestStopped: who stops an install hears that, and not what was waited for.
func TestStopped(t *testing.T) {
	source, dir := binDir(t)
	holder, err := openFolder(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Put(ctx, source, dir); !errors.Is(err, ErrStopped) {
		t.Error("while it waits for the lock:", err)
	}
	if err := holder.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, source, "#!/bin/sh\nexec sleep 1000\n", 0o755)
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Put(ctx, source, dir); !errors.Is(err, ErrStopped) {
		t.Error("while it asks:", err)
	}
	only(t, dir, "bridge")
}

// TestVersion: of a plugin that is installed only what it says of itself counts, so that
// one of another release is known too.
func TestVersion(t *testing.T) {
	for text, want := range map[string]string{
		speaking(`"0.4.0"`, "ip-masq v0.1: masquerades"): "v0.1", speaking(allVersions, "bridge v1: bridges"): "", "#!/bin/sh\nexit 1\n": "",
	} {
		source, _ := binDir(t)
		write(t, source, text, 0o755)
		if have, err := Version(t.Context(), source); have != want || (err == nil) != (want != "") {
			t.Errorf("%q, %v, want %q", have, err, want)
		}
	}
}
