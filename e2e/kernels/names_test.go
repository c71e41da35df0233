// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestNamesOfTests checks that each name by which the machines select tests is that of a test. It
// needs no machine: a program of which no test is selected would pass there.
func TestNamesOfTests(t *testing.T) {
	test := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w*)\(`)
	for _, p := range programs {
		files := assert.Must(filepath.Glob("../../" + p.dir + "/*_test.go"))(t)
		var names []string
		for _, file := range files {
			text := assert.Must(os.ReadFile(file))(t)
			for _, m := range test.FindAllStringSubmatch(string(text), -1) {
				names = append(names, m[1])
			}
		}
		for _, selected := range []string{p.run, p.skip, p.elsewhere} {
			for name := range strings.SplitSeq(strings.Trim(selected, "^($)."), "|") {
				if name != "" && !p.main && !slices.ContainsFunc(names, regexp.MustCompile("^("+name+")$").MatchString) {
					t.Errorf("%s: no test is called %s", p.dir, name)
				}
			}
		}
	}
}

// TestTable checks that docs/kernels/README.md has the results that are beside it.
func TestTable(t *testing.T) {
	have := assert.Must(os.ReadFile(docs + "README.md"))(t)
	assert.Equal(t, "README.md", string(have), table(t))
}

var must = assert.NoError
