// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
)

// binary is a program of bin/, or of a directory there.
func binary(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("IPMASQ_BIN_DIR")
	if dir == "" {
		dir = "../bin"
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("%v; `make test` builds it", err)
	}
	return path
}

// output runs a program that has to succeed.
func output(t *testing.T, stdin []byte, name string, args ...string) []byte {
	t.Helper()
	c := exec.Command(name, args...)
	var stdout, stderr bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	if err := c.Run(); err != nil {
		t.Fatalf("%s %q: %v\n%s", filepath.Base(name), args, err, &stderr)
	}
	return stdout.Bytes()
}

// kustomizations returns the directories for `kubectl apply -k`, and those of the tests, which have
// the components that no overlay has.
func kustomizations(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"kustomize/base", "kustomize/uninstall", "kustomize/overlays/*", "testdata/*"} {
		dirs := assert.Must(filepath.Glob(pattern))(t)
		for _, dir := range dirs {
			if _, err := os.Stat(filepath.Join(dir, "kustomization.yaml")); err == nil {
				all[filepath.Base(dir)] = dir
			}
		}
	}
	if len(all) < 10 {
		t.Fatalf("found %v", all)
	}
	return all
}

// built caches the output for each directory.
var built = map[string][]byte{}

func build(t *testing.T, dir string) []byte {
	t.Helper()
	if built[dir] == nil {
		built[dir] = output(t, nil, binary(t, "deploy/kustomize"), "build", dir)
	}
	return built[dir]
}

// TestGolden compares the kustomizations that others build on with golden files. TestChartEqualsKustomize has
// the others: what they change is in the templates of the chart, too.
func TestGolden(t *testing.T) {
	all := kustomizations(t)
	for _, name := range []string{"base", "uninstall", "agent-replacement"} {
		golden.Check(t, filepath.Join("testdata/golden", name+".yaml"), build(t, all[name]))
	}
}

// nameHash matches the line of a ConfigMap's name, to which kustomize appended a hash.
func nameHash() *regexp.Regexp {
	return regexp.MustCompile(`(?m)^(\s+name: ip-masq)-[a-z0-9]{10}$`)
}

// TestMigrate checks that docs/migrate.md has the files of the kustomizations with which a cluster
// migrates from an agent.
func TestMigrate(t *testing.T) {
	text := assert.Must(os.ReadFile("../docs/migrate.md"))(t)
	indentation := regexp.MustCompile(`(?m)^ +`)
	document := indentation.ReplaceAllString(string(text), "")
	files, err := filepath.Glob("testdata/migrate-*/*")
	if err != nil || len(files) != 5 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, file := range files {
		text := assert.Must(os.ReadFile(file))(t)
		want := strings.TrimPrefix(string(text), "# As docs/migrate.md has it.\n")
		want = indentation.ReplaceAllString(strings.ReplaceAll(want, "../../kustomize/", "../deploy/kustomize/"), "")
		if !strings.Contains(document, "\n"+want+"```\n") {
			t.Errorf("docs/migrate.md lacks\n%s", text)
		}
	}
}

// TestComponentsUsed checks that a kustomization tests each component.
func TestComponentsUsed(t *testing.T) {
	used := map[string]bool{}
	files := assert.Must(filepath.Glob("*/*/*/kustomization.yaml"))(t)
	more := assert.Must(filepath.Glob("testdata/*/kustomization.yaml"))(t)
	for _, file := range append(files, more...) {
		var k struct{ Components []string }
		decode(t, file, &k)
		for _, c := range k.Components {
			used[filepath.Join(filepath.Dir(file), c)] = true
		}
	}
	components := assert.Must(filepath.Glob("kustomize/components/*"))(t)
	for _, c := range components {
		if !used[c] {
			t.Errorf("%s is in no kustomization", c)
		}
	}
}

func decode(t *testing.T, file string, to any) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(data, to)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// TestReadme checks that the README names every component and only existing directories.
func TestReadme(t *testing.T) {
	text := assert.Must(os.ReadFile("README.md"))(t)
	for _, path := range regexp.MustCompile(`deploy/kustomize/[\w/-]+`).FindAllString(string(text), -1) {
		if _, err := os.Stat(filepath.Join("..", path, "kustomization.yaml")); err != nil {
			t.Error(err)
		}
	}
	components := assert.Must(filepath.Glob("kustomize/components/*"))(t)
	for _, c := range components {
		// paths is a base of the components for distributions.
		if name := filepath.Base(c); name != "paths" && !strings.Contains(string(text), "`"+name+"`") {
			t.Errorf("README.md does not name component %s", name)
		}
	}
}
