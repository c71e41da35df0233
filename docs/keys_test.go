// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestKeys compares what documents and the chart have about each key with the table of keys. -update writes
// it. Each key has a section in docs/configure.md, which is written by hand.
func TestKeys(t *testing.T) {
	keys := config.EntryKeys()
	configure := read(t, "docs", "configure.md")
	var readme, reference, manual, values string
	for _, k := range keys {
		help, meaning, standard := k.Help, coded(k.Help), coded(k.Default, k.Type.Choices...)
		if choices := k.Type.Choices; len(choices) > 0 {
			help += ": " + policy.JoinOr(choices)
			meaning += ": " + coded(policy.JoinOr(choices), choices...)
		}
		readme += fmt.Sprintf("| `%s` | %s | %s |\n", k.Name, standard, meaning)
		reference += fmt.Sprintf("| [`%s`](#%s) | %s | %s | %s |\n", k.Name, sectionOf(t, configure, k.Name), k.Type.Name, standard, k.Sources)
		manual += fmt.Sprintf("**%s** (default: %s)\n%s\n", k.Name, k.Default, wrap(": ", "  ", sentence(help)))
		values += "\n" + wrap("  # ", "  # ", sentence(help)+" "+sentence("unset: "+k.Default)) + exampleInChart(k)
	}
	for _, c := range []struct{ file, from, to, text string }{
		{"README.md", "\n| key | default | meaning |\n|---|---|---|\n", "\n", readme},
		{"docs/configure.md", "\n| key | type | default | several sources |\n|---|---|---|---|\n", "\n", reference},
		{"plugin/ip-masq.8.md", "\n**type**\n: ip-masq\n\n", "# ENVIRONMENT\n", manual},
		{"deploy/chart/values.yaml", "\npolicy:\n", "\n# The agents' ConfigMap", strings.TrimPrefix(values, "\n")},
	} {
		before, rest, found := strings.Cut(read(t, c.file), c.from)
		_, after, ends := strings.Cut(rest, "\n"+c.to)
		if !found || !ends {
			t.Fatalf("%s: the place of the keys is not there", c.file)
		}
		golden.Check(t, filepath.Join(root, c.file), before+c.from+strings.TrimSuffix(c.text, "\n")+"\n"+c.to+after)
	}
	const schema = "deploy/chart/values.schema.json"
	blocks := regexp.MustCompile(`(?ms)^ *"nonMasqueradeCIDRs": .*?^( *)"cidrLimit": .*?(,?)$`)
	if n := len(blocks.FindAllString(read(t, schema), -1)); n != 3 {
		t.Fatalf("%s: %d places of the keys, want 3", schema, n)
	}
	golden.Check(t, filepath.Join(root, schema), blocks.ReplaceAllString(read(t, schema), "$1"+strings.Join(schemasInChart(t, keys), ",\n$1")+"$2"))
}

// coded marks keys and values in a text of documents.
func coded(text string, values ...string) string {
	if !strings.Contains(text, " ") && text != "any" && text != "none" {
		return "`" + text + "`"
	}
	for _, k := range config.EntryKeys() {
		values = append(values, k.Name)
	}
	return regexp.MustCompile(`\b(`+strings.Join(values, "|")+`)\b`).ReplaceAllString(text, "`$1`")
}

// sectionOf returns the anchor of the section about a key.
func sectionOf(t *testing.T, text, key string) string {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^### (.+)$`).FindAllStringSubmatch(text, -1) {
		if slices.Contains(strings.Split(m[1], " and "), key) {
			return strings.ToLower(strings.ReplaceAll(m[1], " ", "-"))
		}
	}
	t.Errorf("docs/configure.md has no section about %s", key)
	return ""
}

func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] + "." }

// wrap breaks a text into lines of 100 columns.
func wrap(first, others, text string) string {
	lines, line := "", first
	for word := range strings.FieldsSeq(text) {
		if len(line)+len(word) > maxColumns {
			lines, line = lines+strings.TrimRight(line, " ")+"\n", others
		}
		line += word + " "
	}
	return lines + strings.TrimRight(line, " ") + "\n"
}

// exampleInChart returns the line of values.yaml with a value. The chart itself states backend and guard.
func exampleInChart(k policy.Key) string {
	value := k.Default
	switch {
	case k.Name == "backend":
		return "  backend: nftables\n"
	case k.Name == "guard":
		return "  guard: count\n"
	case strings.HasPrefix(k.Type.Name, "list"):
		value = "[" + k.Type.Example + "]"
	case len(k.Type.Choices) > 0:
		value = k.Type.Choices[0]
	case k.Type.Example != "":
		value = strconv.Quote(k.Type.Example)
	}
	return fmt.Sprintf("  # %s: %s\n", k.Name, value)
}

// schemasInChart returns the members of values.schema.json for the keys that the plugin entry, the agent files
// and [agent] share.
func schemasInChart(t *testing.T, keys []policy.Key) []string {
	t.Helper()
	var all []string
	for _, k := range keys {
		schema := ""
		switch k.Field.(type) {
		case **bool:
			schema = `"type": "boolean"`
		case *[]netip.Prefix:
			schema = `"$$ref": "#/definitions/cidrs"`
		case *[]string:
			schema = `"$$ref": "#/definitions/interfaces"`
		case **policy.Ports:
			schema = `"$$ref": "#/definitions/ports"`
		case **policy.Mark:
			schema = `"$$ref": "#/definitions/mark"`
		case *string:
			schema = `"$$ref": "#/definitions/chain"`
		case policy.Word:
			schema = `"enum": [ "` + strings.Join(k.Type.Choices, `", "`) + `" ]`
			if slices.Contains(k.Type.Choices, "off") { // which is false in YAML
				schema = strings.Replace(schema, " ]", ", false ]", 1)
			}
		case nil:
			if k.Name != "cidrLimit" {
				continue // requireAgentConfig and dataDir, which a plugin entry alone has
			}
			schema = fmt.Sprintf(`"type": "integer", "minimum": 1, "maximum": %d`, policy.MaxCIDRLimit)
		default:
			t.Errorf("%s has a type without a schema", k.Name)
		}
		all = append(all, fmt.Sprintf("%q: { %s }", k.Name, schema))
	}
	return all
}
