// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// maxPath is how long a path can be for the kernel (PATH_MAX), less the NUL at
// its end and room for the name of a file in it (NAME_MAX and a slash).
const maxPath = 4096 - 1 - 256

// pathLike reads the path of a directory. The example is what to write instead.
func pathLike(example string) func(string) (string, error) {
	return func(s string) (string, error) {
		unprintable := func(r rune) bool { return !strconv.IsPrint(r) || r == '\uFFFD' }
		switch clean := filepath.Clean(s); {
		case s == "":
			return "", fmt.Errorf("is empty; write an absolute path such as %s, or leave the key out", example)
		case strings.ContainsFunc(s, unprintable):
			return "", fmt.Errorf("holds characters that cannot be printed; write a path such as %s", example)
		case len(s) > maxPath:
			return "", fmt.Errorf("has %d bytes, more than a path can have; write one of at most %d", len(s), maxPath)
		case !filepath.IsAbs(s):
			return "", fmt.Errorf("is relative; write an absolute path such as %s", example)
		case clean == "/":
			return "", fmt.Errorf("is the root directory; write a directory such as %s", example)
		case clean != s:
			return "", fmt.Errorf("is not the shortest way to write this path; did you mean %s?", policy.Quote(clean))
		}
		return s, nil
	}
}

func networkName(to *string) reader {
	return text("podnet", parseNetworkName, func(s string) { *to = s })
}

func (f *Document) failWithoutName() {
	f.Fail("name", -1, "", `is missing; name the network, such as "podnet"`)
}

// parseNetworkName reads the name of a network: a letter or digit, followed by
// letters, digits, '_', '.' and '-' (CNI spec, "Network configuration objects").
func parseNetworkName(s string) (string, error) {
	if s == "" {
		return "", errors.New(`is empty; name the network, such as "podnet"`)
	}
	for i, r := range s {
		alphanumeric := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alphanumeric && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return "", errors.New("is not the name of a network; write letters, digits, '_', '.' and '-', " +
				"the first a letter or a digit")
		}
	}
	return s, nil
}
