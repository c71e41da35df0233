// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// The test binary runs itself as a child that is killed after so many steps of a
// Put.
const (
	stepsVar  = "INSTALL_TEST_STEPS"
	sourceVar = "INSTALL_TEST_SOURCE"
	dirVar    = "INSTALL_TEST_DIR"
)

func TestMain(m *testing.M) {
	if steps := os.Getenv(stepsVar); steps != "" {
		fmt.Fprintln(os.Stderr, dieAfter(steps))
		os.Exit(1)
	}
	os.Exit(sandbox.Run(m))
}

func dieAfter(steps string) error {
	n, err := strconv.Atoi(steps)
	if err != nil {
		return err
	}
	p := &placement{source: os.Getenv(sourceVar), dir: os.Getenv(dirVar)}
	die := func(context.Context) error { return unix.Kill(os.Getpid(), unix.SIGKILL) }
	return p.run(context.Background(), append(p.steps()[:n], die))
}

func child(t *testing.T, steps int, source, dir string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), self)
	c.Env = append(os.Environ(), fmt.Sprint(stepsVar, "=", steps), sourceVar+"="+source, dirVar+"="+dir)
	return c
}

const allVersions = `"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"`

// plugin is a program that answers as ours of that version does.
func plugin(version string) string {
	return speaking(allVersions, "ip-masq "+version+": masquerades")
}

func speaking(versions, about string) string {
	return `#!/bin/sh
case "$CNI_COMMAND" in
VERSION) echo '{"cniVersion": "1.1.0", "supportedVersions": [` + versions + `]}' ;;
*) echo '` + about + `' >&2 ;;
esac
`
}

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// tree is all that is in a directory: paths, modes, inodes and contents.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %o %d\n", path, st.Mode, st.Ino)
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			b.WriteString(content(t, path))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}
