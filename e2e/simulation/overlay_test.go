// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// simulated are the packages that run on the simulated machine, below the directory of the module.
var simulated = []string{
	"pkg/agentconfig", "pkg/cniplugin", "pkg/config", "pkg/conflist", "pkg/enforce", "pkg/flowcontrol", "pkg/netfilter", "pkg/podinfo",
	"pkg/reconcile", "pkg/safefile", "pkg/store", "pkg/netfilter/netfiltertest", "e2e/simulation",
}

// packages are those whose functions package system has, by the names that files use: the import, the prefix of the names in
// package system, and what uses the import when all functions are replaced.
var packages = map[string]struct{ path, prefix, use string }{
	"os":     {`"os"`, "", "var _ os.FileMode"},
	"unix":   {`"golang.org/x/sys/unix"`, "Unix", "const _ = unix.O_RDONLY"},
	"rand":   {`"math/rand/v2"`, "Rand", "var _ rand.Rand"},
	"ns":     {`"github.com/containernetworking/plugins/pkg/ns"`, "Ns", "var _ ns.NetNS"},
	"sysctl": {`"github.com/containernetworking/plugins/pkg/utils/sysctl"`, "Sysctl", "var _ = sysctl.Sysctl"},
}

// harmless are functions without an effect on the machine, and conversions.
var harmless = []string{"unix.Errno", "unix.NsecToTimespec"}

var (
	selected = regexp.MustCompile(`\b(os|unix|rand|ns|sysctl)\.([A-Z]\w*)(\(?)`)
	declared = regexp.MustCompile(`(?m)^(?:func|type) ([A-Z]\w*)`)
	clause   = regexp.MustCompile(`(?m)^package \w+$`)
)

// buildSimulation builds this test for the simulated machine and returns the program: the files of the product are as
// they are, but for the calls of the functions that package system has.
func buildSimulation(t *testing.T, program string) string {
	root := must(filepath.Abs("../.."))
	has := map[string]bool{}
	for _, file := range goFiles(root, "e2e/simulation/system") {
		for _, d := range declared.FindAllStringSubmatch(read(file), -1) {
			has[d[1]] = true
		}
	}
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name)
	}
	overlay := map[string]string{}
	for _, p := range simulated {
		for _, file := range goFiles(root, p) {
			isOfSimulation := p == "e2e/simulation" && filepath.Base(file) != "overlay_test.go"
			if strings.HasSuffix(file, "_test.go") == isOfSimulation {
				overlay[file] = write(strings.ReplaceAll(p, "/", "_")+"_"+filepath.Base(file), []byte(rewritten(t, file, has, isOfSimulation)))
			}
		}
	}
	text := must(json.Marshal(map[string]any{"Replace": overlay}))
	if program == "" {
		program = filepath.Join(dir, "simulation")
	}
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", write("overlay.json", text), "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the simulation: %v\n%s", err, out)
	}
	return program
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func goFiles(root, dir string) []string { return must(filepath.Glob(filepath.Join(root, dir, "*.go"))) }

func read(file string) string { return string(must(os.ReadFile(file))) }

// rewritten returns a file with the calls of the simulated machine. The simulation itself may have others.
func rewritten(t *testing.T, file string, has map[string]bool, mayHaveOthers bool) string {
	text := read(file)
	var used []string
	next := selected.ReplaceAllStringFunc(text, func(s string) string {
		m := selected.FindStringSubmatch(s)
		p, name, calls := packages[m[1]], m[2], m[3] != ""
		switch {
		case !strings.Contains(text, p.path):
		case has[p.prefix+name]:
			used = append(used, p.use)
			return "simulatedsystem." + p.prefix + name + m[3]
		case calls && !mayHaveOthers && !slices.Contains(harmless, m[1]+"."+name):
			t.Fatalf("%s: the simulated machine has no %s.%s: add %s to package system", file, m[1], name, p.prefix+name)
		}
		return s
	})
	if slices.Sort(used); len(used) > 0 {
		next = clause.ReplaceAllString(next, `$0; import simulatedsystem "github.com/ip-masq/ip-masq-cni/e2e/simulation/system"`)
	}
	return fmt.Sprintf("//line %s:1\n%s\n%s\n", file, next, strings.Join(slices.Compact(used), "\n"))
}
