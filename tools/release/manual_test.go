// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestManual: there is a page for the plugin, the reconciler and each of its commands, and each shell
// gets completions. What groff says of the pages lintian says too, in e2e/packages.
func TestManual(t *testing.T) {
	dir := t.TempDir()
	c := exec.Command("go", "run", "-tags", "man", "-ldflags", "-X main.version=v1.2.3", "./reconciler", dir)
	c.Dir = filepath.Join("..", "..")
	c.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1750000000")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		return string(text)
	}
	pages := []string{"ip-masq", "ip-masq-reconciler"}
	help, err := exec.Command(filepath.Join(binDir(), "ip-masq-reconciler"), "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v; run `make build` first\n%s", err, help)
	}
	_, commands, _ := strings.Cut(string(help), "\nAvailable Commands:\n")
	commands, _, _ = strings.Cut(commands, "\n\n")
	for _, m := range regexp.MustCompile(`(?m)^  ([a-z]+) `).FindAllStringSubmatch(commands, -1) {
		if m[1] != "help" && m[1] != "completion" { // cobra's own
			pages = append(pages, "ip-masq-reconciler-"+m[1])
		}
	}
	if have, _ := filepath.Glob(filepath.Join(dir, "man", "*")); len(have) != len(pages) || len(pages) < 10 {
		t.Errorf("there are the pages %q, want those of %q", have, pages)
	}
	for _, name := range pages {
		page := read("man/" + name + ".8")
		if !strings.Contains(page, `" "8" "Jun 2025" "ip-masq v1.2.3" "ip-masq"`) {
			t.Errorf("%s has a header without section, date, or version:\n%.200s", name, page)
		}
		if strings.Count(page, "\n.SH EXIT STATUS\n") != 1 || strings.Count(page, "\n.SH EXAMPLE\n.EX\n")+strings.Count(page, "\n.EX\nCNI_COMMAND=") == 0 {
			t.Errorf("%s lacks the exit status, or examples in a literal block:\n%s", name, page)
		}
		for _, m := range regexp.MustCompile(`\\fB(ip-masq[a-z-]*)\(8\)`).FindAllStringSubmatch(page, -1) {
			if !slices.Contains(pages, m[1]) {
				t.Errorf("%s refers to %s(8), which does not exist", name, m[1])
			}
		}
	}
	if page := read("man/ip-masq-reconciler.8"); !strings.Contains(page, ".SH FILES") || !strings.Contains(page, "resync-interval") {
		t.Errorf("ip-masq-reconciler(8) lacks files or options:\n%s", page)
	}
	if page := read("man/ip-masq-reconciler-install.8"); strings.Contains(page, "resync-interval") {
		t.Errorf("ip-masq-reconciler-install(8) repeats the settings:\n%s", page)
	}
	for name, marker := range map[string]string{
		"bash/ip-masq-reconciler": "complete -o default", "zsh/_ip-masq-reconciler": "#compdef ip-masq-reconciler",
		"fish/ip-masq-reconciler.fish": "complete -c ip-masq-reconciler",
	} {
		if !strings.Contains(read("completions/"+name), marker) {
			t.Errorf("%s has no %q", name, marker)
		}
	}
	load := exec.Command("bash", "-c", `. "$0" && complete -p ip-masq-reconciler`, filepath.Join(dir, "completions", "bash", "ip-masq-reconciler"))
	if out, err := load.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "complete -o default -F ") {
		t.Errorf("bash loads no completions: %v\n%s", err, out)
	}
}
