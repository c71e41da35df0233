// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	hole     = "\x00" // in a string of the code: a format verb, or an operand that is not constant
	ellipsis = "…"    // in a document: any text
)

var (
	verb   = regexp.MustCompile(`["\w.,:/'-]*(?:%[-+# 0]*[\d*.]*[a-zA-Z]|\x00)["\w.,:/'-]*`)
	lexeme = regexp.MustCompile(`…|\x00|"[^"\s…]*(?: [^"\s…]*)?"|[\pL\pN_]+(?:['.,:/@+-][\pL\pN_]+)*|\S`)
	plain  = regexp.MustCompile(`^[A-Za-z][a-z]+(?:['-][a-z]+)*$`) // a word that is no address, path or key
)

// literals returns the tokens of each string of the code, and of the libraries that documents quote.
func literals(t *testing.T) [][]string {
	t.Helper()
	list := exec.Command("go", "list", "-e", "-f", `{{range .GoFiles}}{{$.Dir}}/{{.}}{{"\n"}}{{end}}`,
		"./pkg/...", "./plugin", "./reconciler", "./e2e/demo", "syscall", "os/signal", "log/slog",
		"github.com/containernetworking/cni/...", "github.com/BurntSushi/toml", "go.yaml.in/yaml/v3")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	release, _ := filepath.Glob(filepath.Join(root, "tools", "release", "*.go")) // a module of its own
	var all [][]string
	seen := map[string]bool{}
	for _, file := range append(strings.Fields(string(out)), release...) {
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			e, is := n.(ast.Expr)
			if !is || constant(e) == hole {
				return true
			}
			for line := range strings.Lines(constant(e)) {
				line = verb.ReplaceAllString(line, " "+hole+" ")
				if l := lexeme.FindAllString(line, -1); !seen[line] && first(l) >= 0 {
					seen[line] = true
					all = append(all, l)
				}
			}
			return false
		})
	}
	return all
}

// constant returns the text of a string literal or of a sum with one, with holes.
func constant(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			text, _ := strconv.Unquote(e.Value)
			return text
		}
	case *ast.BinaryExpr:
		if x, y := constant(e.X), constant(e.Y); e.Op == token.ADD && x+y != hole+hole {
			return x + y
		}
	}
	return hole
}

// first returns the index of the first token of a string that is not a hole.
func first(l []string) int {
	return slices.IndexFunc(l, func(s string) bool { return s != hole })
}

// match is a part of a message that a string of the code has.
type match struct {
	constant, variable []int // the tokens that the string has, and those in place of its holes
	whole              bool  // the string ends within the message
}

// align compares a string of the code, from its token i, with a message, from its token j.
func align(l, message []string, i, j int) (best match, ok bool) {
	switch {
	case i == len(l):
		return match{whole: true}, true
	case j == len(message):
		return match{whole: i == len(l)-1 && l[i] == hole}, true
	case l[i] == hole && i == len(l)-1:
		return match{variable: []int{j}, whole: true}, true
	case l[i] == hole:
		for k := j; k <= min(j+40, len(message)) && !best.whole; k++ {
			m, is := align(l, message, i+1, k)
			if !is || ok && len(m.constant) <= len(best.constant) {
				continue
			}
			if plains(message[j:k]) < 2 {
				for v := j; v < k; v++ {
					m.variable = append(m.variable, v)
				}
			}
			best, ok = m, true
		}
	case message[j] == ellipsis:
		return match{}, true
	case l[i] == message[j]:
		best, ok = align(l, message, i+1, j+1)
		best.constant = append(best.constant, j)
	}
	return best, ok
}

func plains(tokens []string) (count int) {
	for _, s := range tokens {
		if plain.MatchString(s) {
			count++
		}
	}
	return count
}

// unknown returns the plain words of a message that no string of the code has.
func unknown(message []string, code [][]string) []string {
	if plains(message) == len(message) {
		words := " " + strings.Join(message, " ") + " "
		contains := func(l []string) bool { return strings.Contains(" "+strings.Join(l, " ")+" ", words) }
		if !slices.ContainsFunc(code, contains) {
			return message
		}
		return nil
	}
	known := make([]bool, len(message))
	mark := func(l []string, i, j int) {
		if l[i] != message[j] {
			return
		}
		m, ok := align(l, message, i, j)
		count := 0
		for _, k := range m.constant {
			count += plains(message[k : k+1])
		}
		if !ok || count < 2 && (!m.whole || i != first(l)) {
			return
		}
		// A value precedes the string: "private is not a CIDR".
		if j > 0 && (i > 0 && l[i-1] == hole || i == 0 && (l[0] == "is" || l[0] == "has")) {
			m.variable = append(m.variable, j-1)
		}
		if count > 1 {
			m.constant = append(m.constant, m.variable...)
		}
		for _, k := range m.constant {
			known[k] = true
		}
	}
	for _, l := range code {
		for j := range message {
			mark(l, first(l), j)
			for i := first(l) + 1; i < len(l) && (j == 0 || message[j-1] == ellipsis); i++ {
				mark(l, i, j)
			}
		}
	}
	var bad []string
	for i, s := range message {
		singular := func(l []string) bool { return len(l) == 1 && l[0]+"s" == s } // "2 reasons"
		if !known[i] && plain.MatchString(s) && !slices.ContainsFunc(code, singular) {
			bad = append(bad, s)
		}
	}
	return bad
}

// TestUnknown: the words of a right message are known, and a changed or a swapped one is not.
func TestUnknown(t *testing.T) {
	code := literals(t)
	for message, right := range map[string]bool{
		"repaired rules": true,
		"rules repaired": false,
		`nonMasqueradeCIDRs[0]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?`:    true,
		`nonMasqueradeCIDRs[0]: 10.0.1.24/24 has network bits set; did you mean 10.0.1.0/24?`: false,
		`nonMasqueradeCIDRs[0]: 10.0.1.24/24 has bits host set; did you mean 10.0.1.0/24?`:    false,
		"… has host bits set; did you mean …":                                                 true,
		"… has host bits set; do you mean …":                                                  false,
	} {
		if bad := unknown(lexeme.FindAllString(message, -1), code); (len(bad) == 0) != right {
			t.Errorf("%s: unknown: %q", message, bad)
		}
	}
}

var (
	block  = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```$")
	span   = regexp.MustCompile("`([^`\n]+(?:\n[^`\n]+)?)`")
	option = regexp.MustCompile(`\s-\w\b`)
	// Commands after a prompt, and the output of other programs.
	foreign = regexp.MustCompile(`(?s)^\s*\$ (?:iptables|nft) .*|(?m:^\s*(?:\$|udp) .*\n)`)
)

// isMessage reports whether a code span is a message: it has two plain words side by side, and is
// neither a command nor a piece of a file.
func isMessage(text string, programs []string) bool {
	if option.MatchString(text) || strings.ContainsAny(text[:1], `"{[<-$/ `) || slices.Contains(programs, strings.Fields(text)[0]) {
		return false
	}
	tokens := lexeme.FindAllString(text, -1)
	for i := range tokens {
		if plains(tokens[i:min(i+2, len(tokens))]) == 2 {
			return true
		}
	}
	return false
}

// TestMessages: each message and each output that a document for users quotes is made of strings of
// the code. A string counts only as a whole, with any text in place of its format verbs, or, where the
// quotation begins, ends or has "…", as a part with two words. A plain word that no such string has is
// an error, except a value: one word in place of a verb of a string with two constant words.
func TestMessages(t *testing.T) {
	code, all := literals(t), documents(t)
	programs := []string{"go"}
	for _, text := range all {
		for _, m := range block.FindAllStringSubmatch(text, -1) {
			if m[1] == "sh" {
				programs = append(programs, names(`(?m)^\s*(?:./)?([a-z][\w-]*)`, m[2])...)
			}
		}
	}
	quoted := 0
	for path, text := range all {
		if filepath.Dir(path) == root && path != filepath.Join(root, "README.md") {
			continue // for developers
		}
		// Runtimes and kubelet print the messages of this section.
		before, section, _ := strings.Cut(text, "\n## The node is NotReady\n")
		_, after, _ := strings.Cut(section, "\n## ")
		text = before + after
		var messages []string
		for _, m := range block.FindAllStringSubmatch(text, -1) {
			if m[1] == "text" || m[1] == "console" {
				messages = append(messages, foreign.ReplaceAllString(m[2], ""))
			}
		}
		for _, m := range span.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			if isMessage(m[1], programs) {
				messages = append(messages, m[1])
			}
		}
		for _, m := range messages {
			quoted++
			if bad := unknown(lexeme.FindAllString(m, -1), code); len(bad) > 0 {
				t.Errorf("%s quotes\n%s\nand no string of the code has %q there", path, m, bad)
			}
		}
	}
	if quoted < 150 {
		t.Errorf("found %d messages: the pattern is wrong", quoted)
	}
}
