// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/ip-masq/ip-masq-cni"

// simulated are the packages that run on the simulated machine, below the directory of the module.
var simulated = []string{
	"pkg/agentconfig", "pkg/cniplugin", "pkg/config", "pkg/conflist", "pkg/enforce", "pkg/flowcontrol", "pkg/netfilter", "pkg/reconcile",
	"pkg/safefile", "pkg/store", "e2e/simulation",
}

// prefixes are those that names of packages have in package system.
var prefixes = map[string]string{"os": "", "golang.org/x/sys/unix": "Unix", "math/rand/v2": "Rand"}

// harmless are functions without an effect on the machine, and conversions.
var harmless = []string{"unix.Errno", "unix.NsecToTimespec"}

// buildSimulation builds this test for the simulated machine and returns the program: the files of the product are as
// they are, but for the calls of the functions that package system has.
func buildSimulation(t *testing.T, program string) string {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	have := exported(t, filepath.Join(root, "e2e/simulation/system"))
	dir := t.TempDir()
	overlay := map[string]string{}
	for _, p := range simulated {
		files, err := filepath.Glob(filepath.Join(root, p, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", p, err)
		}
		for _, file := range files {
			isTest := strings.HasSuffix(file, "_test.go")
			if isTest != (p == "e2e/simulation") || filepath.Base(file) == "overlay_test.go" {
				continue
			}
			if text := rewritten(t, file, have); text != nil {
				overlay[file] = filepath.Join(dir, strings.ReplaceAll(p, "/", "_")+"_"+filepath.Base(file))
				if err := os.WriteFile(overlay[file], text, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if program == "" {
		program = filepath.Join(dir, "simulation")
	}
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", filepath.Join(dir, "overlay.json"), "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the simulation: %v\n%s", err, out)
	}
	return program
}

// exported returns the functions and types of a package.
func exported(t *testing.T, dir string) map[string]bool {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for name := range parsed.Scope.Objects {
			names[name] = true
		}
	}
	return names
}

// rewritten returns a file with the calls of the simulated machine, nil if it has none.
func rewritten(t *testing.T, file string, have map[string]bool) []byte {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, text, 0)
	if err != nil {
		t.Fatal(err)
	}
	imported := map[string]string{} // the prefix of its functions, by the name of a package
	var used []string
	for _, i := range parsed.Imports {
		path := strings.Trim(i.Path.Value, `"`)
		if prefix, is := prefixes[path]; is {
			name := filepath.Base(path)
			if name == "v2" {
				name = "rand"
			}
			imported[name] = prefix
		}
	}
	type edit struct {
		at, end int
		text    string
	}
	var edits []edit
	called := map[ast.Expr]bool{}
	ast.Inspect(parsed, func(n ast.Node) bool {
		if call, is := n.(*ast.CallExpr); is {
			called[call.Fun] = true
		}
		s, is := n.(*ast.SelectorExpr)
		if !is {
			return true
		}
		x, is := s.X.(*ast.Ident)
		if !is || x.Obj != nil {
			return true
		}
		prefix, is := imported[x.Name]
		name := x.Name + "." + s.Sel.Name
		switch {
		case !is:
		case have[prefix+s.Sel.Name]:
			edits = append(edits, edit{set.Position(s.Pos()).Offset, set.Position(s.End()).Offset, "simulatedsystem." + prefix + s.Sel.Name})
			if !slices.Contains(used, x.Name) {
				used = append(used, x.Name)
			}
		case called[s] && !slices.Contains(harmless, name) && !strings.Contains(file, "e2e/simulation"):
			t.Fatalf("%s: the simulated machine has no %s: add %s to package system", set.Position(s.Pos()), name, prefix+s.Sel.Name)
		}
		return true
	})
	if len(edits) == 0 {
		return nil
	}
	keep := map[string]string{"os": "var _ os.FileMode", "unix": "const _ = unix.O_RDONLY", "rand": "var _ rand.Rand"}
	var tail string
	for _, name := range used { // its import may be unused now
		tail += "\n" + keep[name] + "\n"
	}
	at := set.Position(parsed.Name.End()).Offset
	edits = append(edits, edit{at, at, fmt.Sprintf("; import simulatedsystem %q", module+"/e2e/simulation/system")})
	slices.SortFunc(edits, func(a, b edit) int { return a.at - b.at })
	var out bytes.Buffer
	fmt.Fprintf(&out, "//line %s:1\n", file)
	last := 0
	for _, e := range edits {
		out.Write(text[last:e.at])
		out.WriteString(e.text)
		last = e.end
	}
	out.Write(text[last:])
	out.WriteString(tail)
	return out.Bytes()
}
