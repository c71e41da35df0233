// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// maxPluginBytes keeps what the kernel maps and what an installer copies small.
const maxPluginBytes = 6_000_000

// ours is the name pattern of the binaries of `make build`; pinned tools are in subdirectories.
const ours = "ip-masq*"

func TestBinariesAreStatic(t *testing.T) {
	binaries, err := filepath.Glob(filepath.Join(binDir(), ours))
	must(t, err)
	if len(binaries) == 0 {
		t.Fatalf("no %s in %s; run `make build` first", ours, binDir())
	}
	for _, path := range binaries {
		t.Run(filepath.Base(path), func(t *testing.T) {
			assertStatic(t, path)
		})
	}
}

func TestPluginIsSmall(t *testing.T) {
	info, err := os.Stat(filepath.Join(binDir(), "ip-masq"))
	if err != nil {
		t.Fatalf("%v; run `make build` first", err)
	}
	if info.Size() >= maxPluginBytes {
		t.Errorf("ip-masq has %d bytes, which must stay below %d; `go tool nm -size -sort size` on a build without -s shows what grew",
			info.Size(), maxPluginBytes)
	}
}

// The linker ignores an unknown variable, so the test compares the version that the program prints.
func TestPluginCarriesItsVersion(t *testing.T) {
	plugin := exec.Command(filepath.Join(binDir(), "ip-masq"))
	plugin.Env = []string{} // without CNI_COMMAND a plugin prints its name
	about, err := plugin.CombinedOutput()
	if err != nil {
		t.Fatalf("run ip-masq: %v; run `make build` first\n%s", err, about)
	}
	if !bytes.HasPrefix(about, []byte("CNI ip-masq plugin ")) || bytes.HasPrefix(about, []byte("CNI ip-masq plugin version unknown")) {
		t.Errorf("ip-masq without CNI_COMMAND says %q; want its name and the version that `make build` stamps", about)
	}
}

func TestReconcilerCarriesItsVersion(t *testing.T) {
	about, err := exec.Command(filepath.Join(binDir(), "ip-masq-reconciler"), "version").CombinedOutput()
	if err != nil {
		t.Fatalf("run ip-masq-reconciler: %v; run `make build` first\n%s", err, about)
	}
	if !bytes.HasPrefix(about, []byte("ip-masq-reconciler ")) || bytes.HasPrefix(about, []byte("ip-masq-reconciler unknown")) {
		t.Errorf("ip-masq-reconciler version says %q; want the version that `make build` stamps", about)
	}
}

// Package initialization of imports adds to the time of every ADD. Only the reconciler needs these.
func TestPluginImportsNothingHeavy(t *testing.T) {
	list, err := exec.Command("go", "-C", "../..", "list", "-deps", "./plugin").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, list)
	}
	for _, heavy := range []string{"yaml", "prometheus", "protobuf", "cobra", "pflag", "fsnotify", "net/http"} {
		for _, name := range strings.Fields(string(list)) {
			if strings.Contains(name, heavy) {
				t.Errorf("the plugin imports %s; `go list -deps -f '{{.ImportPath}}: {{.Imports}}' ./plugin` shows why", name)
			}
		}
	}
}

// assertStatic fails when the program at path needs a loader or a library of the host.
func assertStatic(t *testing.T, path string) {
	t.Helper()
	program, err := elf.Open(path)
	if err != nil {
		t.Fatalf("read program headers: %v", err)
	}
	defer program.Close()
	for _, header := range program.Progs {
		if header.Type == elf.PT_INTERP || header.Type == elf.PT_DYNAMIC {
			t.Errorf("%s has a %s program header: it is not static; build it with CGO_ENABLED=0", path, header.Type)
		}
	}
}

// binDir is where `make build` puts the binaries.
func binDir() string {
	if dir := os.Getenv("IPMASQ_BIN_DIR"); dir != "" {
		return dir
	}
	return filepath.Join("..", "..", "bin")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
